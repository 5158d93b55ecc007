"""Defines the configuration: frozen dataclasses, one file per subject, a sentence per field.

Fields that the user may leave out and that `resolve` derives are declared without `| None`: after resolving
they always hold a value, and that is the form in which the rest of the program sees them.
"""

from dataclasses import dataclass, field

from megatron_ext.config.schema.data import DataConfig
from megatron_ext.config.schema.layout import LayoutConfig
from megatron_ext.config.schema.model import ModelConfig
from megatron_ext.config.schema.optimizer import OptimizerConfig
from megatron_ext.config.schema.profiling import ProfilingConfig
from megatron_ext.config.schema.run import CheckpointConfig, LoggingConfig
from megatron_ext.config.schema.training import TrainingConfig


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
