"""Defines the configuration: frozen dataclasses, one file per subject, a sentence per field.

Fields that the user may leave out and that `resolve` derives are declared without `| None`: after resolving
they always hold a value, and that is the form in which the rest of the program sees them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_ext.config.schema import (
    checkpoint_and_logging_flags,
    data_flags,
    layout_flags,
    model_flags,
    optimizer_flags,
    training_flags,
)
from megatron_ext.registry import brought


def _with_plugins(group: str, core: type) -> type:
    """Return a group of the configuration with the fields of plugins after the fields of the core."""
    added = [flags for name, flags in brought("flags") if name == group]
    if not added:
        return core
    # A dataclass takes the fields of its last base first.
    made = type(core.__name__, (*reversed(added), core), {"__doc__": core.__doc__, "__module__": __name__})
    return dataclass(frozen=True)(made)


if TYPE_CHECKING:
    from megatron_ext.config.schema.checkpoint_and_logging_flags import (
        CheckpointConfig,
        LoggingConfig,
        ProfilingConfig,
    )
    from megatron_ext.config.schema.data_flags import DataConfig
    from megatron_ext.config.schema.layout_flags import LayoutConfig
    from megatron_ext.config.schema.model_flags import ModelConfig
    from megatron_ext.config.schema.optimizer_flags import OptimizerConfig
    from megatron_ext.config.schema.training_flags import TrainingConfig
else:
    ModelConfig = _with_plugins("model", model_flags.ModelConfig)
    LayoutConfig = _with_plugins("layout", layout_flags.LayoutConfig)
    TrainingConfig = _with_plugins("training", training_flags.TrainingConfig)
    OptimizerConfig = _with_plugins("optimizer", optimizer_flags.OptimizerConfig)
    DataConfig = _with_plugins("data", data_flags.DataConfig)
    CheckpointConfig = _with_plugins("checkpoint", checkpoint_and_logging_flags.CheckpointConfig)
    LoggingConfig = _with_plugins("logging", checkpoint_and_logging_flags.LoggingConfig)
    ProfilingConfig = _with_plugins("profiling", checkpoint_and_logging_flags.ProfilingConfig)


def flags_of[Flags](group: object, flags: type[Flags]) -> Flags:
    """Return a group of the configuration as the flags that a plugin adds to it."""
    assert isinstance(group, flags), f"{flags.__name__} are no flags of {type(group).__name__}"
    return group


@dataclass(frozen=True)
class Config:
    """Holds everything that decides a run. Field names are unique across the groups: each is a flag."""

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)


__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LayoutConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfilingConfig",
    "TrainingConfig",
    "flags_of",
]
