"""Writes to Comet, with the tags of TensorBoard; only where it is asked for and installed."""

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.schema import LoggingConfig
from megatron_ext.telemetry.metrics import Metrics
from megatron_ext.telemetry.packages import imported
from megatron_ext.telemetry.scalars import scalars


class CometWriter:
    """Writes one Comet experiment; its steps are iterations."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the experiment and record the arguments of ours with it.

        Raises:
            ConfigurationError: the comet_ml package is not installed.
        """
        assert options.comet_project is not None
        comet = imported("comet_ml", "--comet-project", options.comet_project)
        self._experiment = comet.start(workspace=options.comet_workspace, project_name=options.comet_project)
        if options.comet_experiment_name is not None:
            self._experiment.set_name(options.comet_experiment_name)
        self._experiment.log_parameters(dict(arguments))

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        values = scalars(metrics)
        if values:
            consumed = {"samples vs steps": metrics.consumed_samples}
            self._experiment.log_metrics(values | consumed, step=metrics.iteration)

    def close(self) -> None:
        """End the experiment, once all is sent."""
        self._experiment.end()
