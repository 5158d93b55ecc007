"""Writes the log line and the validation lines to standard output."""

from datetime import datetime

from megatron_ext.telemetry.log_line import evaluation_lines, step_line
from megatron_ext.telemetry.metrics import Metrics, StepMetrics


class Console:
    """Prints what is logged."""

    def __init__(self, *, throughput: bool):
        self._throughput = throughput

    def write(self, metrics: Metrics) -> None:
        """Print the line of a step or of an evaluation."""
        if isinstance(metrics, StepMetrics):
            print(step_line(metrics, datetime.now(), throughput=self._throughput), flush=True)
        else:
            print(evaluation_lines(metrics), flush=True)

    def close(self) -> None:
        """Do nothing: no file is held open."""
