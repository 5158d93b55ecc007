"""Writes to Weights & Biases, with the tags of TensorBoard; only where it is asked for and installed."""

import importlib
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.schema import LoggingConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.telemetry.metrics import Metrics
from megatron_ext.telemetry.scalars import scalars


class WandbWriter:
    """Writes one Weights & Biases run; its steps are iterations, and `samples vs steps` gives the samples of each."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the run and record the arguments of ours with it.

        Raises:
            ConfigurationError: the wandb package is not installed.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigurationError(
                f"--wandb-project {options.wandb_project} needs the wandb package, which is not installed: "
                "pip install wandb, or leave the flag out."
            ) from error
        self._run = wandb.init(
            project=options.wandb_project,
            name=options.wandb_exp_name,
            entity=options.wandb_entity,
            dir=options.wandb_save_dir,
            config=dict(arguments),
        )

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        self._run.log(scalars(metrics) | {"samples vs steps": metrics.consumed_samples}, step=metrics.iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
