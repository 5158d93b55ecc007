"""From the command line to a checked configuration. No torch: `--dry-run` and `--help` come through here too."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.arguments import Typed, parse
from megatron_ext.config.blend import missing_paths
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.config.validate import problems
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.build import build_tokenizer


@dataclass(frozen=True)
class Configured:
    config: Config
    typed: Typed


def configure(argv: Sequence[str]) -> Configured:
    """Parse, resolve and validate.

    Raises:
        ConfigurationError: with every problem that was found.
    """
    typed = parse(argv)
    facts = gather_facts(typed)
    config = resolve(typed.values, facts)
    found = problems(config, facts)
    if found:
        raise ConfigurationError(found)
    return Configured(config, typed)


def gather_facts(typed: Typed) -> Facts:
    """Read what the configuration depends on outside of the flags: ranks, GPUs, files, the vocabulary."""
    vocab_size, tokenizer_error = _vocabulary(typed.values)
    dry_run_decides = typed.dry_run and typed.values.get("world_size") is not None
    return Facts(
        world_size=None if dry_run_decides else int(os.environ.get("WORLD_SIZE", "1")),
        cuda_available=Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists(),
        vocab_size=vocab_size,
        tokenizer_error=tokenizer_error,
        missing_paths=missing_paths(typed.values),
    )


def _vocabulary(values: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Size of the vocabulary of the tokenizer that the flags name, and why it could not be read."""
    kind = values.get("tokenizer_type")
    if kind is None:
        return None, None
    try:
        return build_tokenizer(kind, values.get("tokenizer_model"), values.get("vocab_size")).vocab_size, None
    except ConfigurationError as error:
        return None, str(error)
