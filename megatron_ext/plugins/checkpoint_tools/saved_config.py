"""Reads the configuration of a checkpoint for tools, which have no flags of a run. No torch."""

from pathlib import Path

from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG
from megatron_ext.checkpoint.native.extra_files import kept_tokenizer
from megatron_ext.config.derived.optimizers import has_own_optimizer
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError


def saved_config(path: Path) -> Config:
    """Return the configuration of the run that saved a checkpoint, with the checkpoint's copy of its tokenizer.

    Raises:
        ConfigurationError: the checkpoint has no `config.yaml`, or one that cannot be read.
    """
    if not (path / CONFIG).exists():
        raise ConfigurationError(f"{path} has no {CONFIG}, which says what model it holds; resume and save it once")
    values = read_saved(path / CONFIG) or {}
    if has_own_optimizer(values):  # which no weights depend on
        del values["optimizer"]
    else:
        values = parse(["--config", str(path / CONFIG)]).values
    return resolve({**values, **kept_tokenizer(values, path)}, Facts())
