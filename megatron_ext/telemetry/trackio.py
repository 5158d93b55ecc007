"""Writes to Trackio, with the tags of TensorBoard; only where it is asked for and installed."""

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.schema import LoggingConfig
from megatron_ext.telemetry.metrics import Metrics
from megatron_ext.telemetry.packages import imported
from megatron_ext.telemetry.scalars import scalars


class TrackioWriter:
    """Writes one Trackio run; its steps are iterations. A run of the same name is gone on with."""

    def __init__(self, options: LoggingConfig, arguments: Mapping[str, Any]):
        """Start the run and record the arguments of ours with it.

        Raises:
            ConfigurationError: the trackio package is not installed.
        """
        assert options.trackio_project is not None
        trackio = imported("trackio", "--trackio-project", options.trackio_project)
        self._run = trackio.init(
            project=options.trackio_project,
            name=options.trackio_run_name,
            space_id=options.trackio_space_id,
            config={name: str(value) for name, value in arguments.items()},
            resume="allow",
        )

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation."""
        values = scalars(metrics)
        if values:
            self._run.log(values | {"samples vs steps": metrics.consumed_samples}, step=metrics.iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
