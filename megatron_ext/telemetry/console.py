"""The log line and the validation lines on standard output."""

from datetime import datetime

from megatron_ext.telemetry.log_line import evaluation_lines, step_line
from megatron_ext.telemetry.metrics import Metrics, StepMetrics


class Console:
    def __init__(self, *, throughput: bool):
        self._throughput = throughput

    def write(self, metrics: Metrics) -> None:
        if isinstance(metrics, StepMetrics):
            print(step_line(metrics, datetime.now(), throughput=self._throughput), flush=True)
        else:
            print(evaluation_lines(metrics), flush=True)

    def close(self) -> None:
        """Nothing is held."""
