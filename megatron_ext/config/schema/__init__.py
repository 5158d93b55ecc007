"""Defines the configuration: frozen dataclasses, one file per subject, a sentence per field.

Fields that the user may leave out and that `resolve` derives are declared without `| None`: after resolving
they always hold a value, and that is the form in which the rest of the program sees them.
"""

from dataclasses import dataclass, field

from megatron_ext.config.schema.checkpoint_and_logging_flags import CheckpointConfig, LoggingConfig, ProfilingConfig
from megatron_ext.config.schema.data_flags import DataConfig
from megatron_ext.config.schema.layout_flags import LayoutConfig
from megatron_ext.config.schema.model_flags import ModelConfig
from megatron_ext.config.schema.optimizer_flags import OptimizerConfig
from megatron_ext.config.schema.training_flags import TrainingConfig


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
]
