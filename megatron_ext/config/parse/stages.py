"""Reads the stages of a run: --stages, a YAML file of flags that change at given iterations.

0: {data_path: [0.7, data/web, 0.3, data/books]}
10000: {data_path: [0.5, data/code, 0.5, data/books], seq_length: 32768, rotary_base: 500000, micro_batch_size: 1}

A flag that a stage does not name keeps its value of the stage before, or at first of the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.parse.options import options_by_name, read_yaml_value
from megatron_ext.errors import ConfigurationError

NAMES = ("data_path", "train_data_path", "seq_length", "rotary_base", "micro_batch_size")
"""The fields that a stage may change. None of them changes the shape of a weight."""

_MOST = 64  # stages: each is checked before the start
_EXAMPLE = "1000: {seq_length: 8192, rotary_base: 500000}"


@dataclass(frozen=True)
class Stage:
    """A range of iterations with flags of their own."""

    first: int
    """Number of iterations before the stage."""
    values: Mapping[str, Any]
    """Values of the flags in this stage, by field name, for the fields that it or an earlier stage names."""
    path: str | None = None
    """Path of the --stages file; None for a run without stages."""

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return typed values as they are in this stage."""
        return {**values, **self.values}

    @property
    def named(self) -> str:
        """The start of a message about it; empty for a run without stages."""
        return "" if self.path is None else f"--stages {self.path}, from iteration {self.first}: "


def read_stages(values: Mapping[str, Any]) -> list[Stage]:
    """Return the stages of a run in their order, the first of which begins at 0; without --stages there is that one.

    Args:
        values: typed values, by field name.
    Raises:
        ConfigurationError: the file cannot be read, or is no list of stages; all problems are named, with the stage and
            the key.
    """
    path = values.get("stages")
    if path is None:
        return [Stage(0, {})]
    from megatron_ext.config.parse.config_file import read_yaml  # with PyYAML, for which --dry-run does not wait

    content, problems = read_yaml(path, "--stages", int, _EXAMPLE), []
    if not 0 < len(content) <= _MOST:
        raise ConfigurationError(f"--stages {path} has {len(content)} stages; give 1 to {_MOST}, as {_EXAMPLE}")
    stages = [Stage(0, {}, path)]
    for first in sorted(content):
        changes = {}
        if first < 0 or not isinstance(content[first], dict) or not content[first]:
            problems.append(f"--stages {path}: {first} is no stage; give lines of the form `{_EXAMPLE}`")
            continue
        for key, value in content[first].items():
            try:
                if key not in NAMES:
                    raise ValueError(f"a stage cannot change it; it can change {', '.join(NAMES)}")
                changes[key] = read_yaml_value(options_by_name()[key], value)
            except ValueError as error:
                problems.append(f"--stages {path}, from iteration {first}: {key}: {error}")
        stages.append(Stage(first, {**stages[-1].values, **changes}, path))
    if problems:
        raise ConfigurationError(problems)
    if stages[1].first == 0:
        del stages[0]
    # A learned table, and what rules compare with it, has the rows of the longest stage from the beginning.
    lengths = [stage.of(values).get("seq_length") or 0 for stage in stages]
    rows = {} if "max_position_embeddings" in values else {"max_position_embeddings": max(lengths)}
    return [Stage(stage.first, {**rows, **stage.values}, path) for stage in stages]


def at_iteration(stages: list[Stage], iteration: int) -> list[Stage]:
    """Return the stage that the step after `iteration` belongs to, and those that follow."""
    return [
        stage for stage, after in zip(stages, [*stages[1:], None], strict=True) if not after or after.first > iteration
    ]


def largest(stages: list[Stage], values: Mapping[str, Any]) -> Stage:
    """Return the stage whose microbatch has the most tokens, which takes the most memory."""

    def tokens(stage: Stage) -> int:
        own = stage.of(values)
        return (own.get("seq_length") or 1) * (own.get("micro_batch_size") or 1)

    return max(stages, key=tokens)
