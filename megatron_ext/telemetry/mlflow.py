"""Writes to MLflow, with the tags of TensorBoard; only where it is asked for and installed."""

import itertools
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.schema import LoggingConfig
from megatron_ext.telemetry.metrics import Metrics
from megatron_ext.telemetry.packages import imported
from megatron_ext.telemetry.scalars import scalars

# MLflow's servers take no more parameters in one request, and cut longer values off with an error.
_MOST_PARAMETERS, _LONGEST_VALUE = 100, 500


class MlflowWriter:
    """Writes one MLflow run; its steps are iterations."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the run and record the arguments of ours with it.

        Raises:
            ConfigurationError: the mlflow package is not installed.
        """
        assert options.mlflow_experiment is not None
        self._mlflow = imported("mlflow", "--mlflow-experiment", options.mlflow_experiment)
        if options.mlflow_tracking_uri is not None:
            self._mlflow.set_tracking_uri(options.mlflow_tracking_uri)
        self._mlflow.set_experiment(options.mlflow_experiment)
        self._mlflow.start_run(run_name=options.mlflow_run_name)
        texts = ((name, str(value)[:_LONGEST_VALUE]) for name, value in arguments.items())
        while batch := dict(itertools.islice(texts, _MOST_PARAMETERS)):
            self._mlflow.log_params(batch)

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        values = scalars(metrics)
        if values:
            consumed = {"samples vs steps": metrics.consumed_samples}
            self._mlflow.log_metrics(values | consumed, step=metrics.iteration)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()
