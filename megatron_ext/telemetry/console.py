"""Writes the log line and the validation lines to standard output."""

import sys
from datetime import datetime

from megatron_ext.telemetry.log_line import evaluation_lines, step_line
from megatron_ext.telemetry.metrics import Metrics, StepMetrics
from megatron_ext.telemetry.short_line import short_line
from megatron_ext.terminal import say


class Console:
    """Prints what is logged.

    Args:
        throughput: whether Megatron's line has the TFLOP/s per GPU.
        form: `megatron`; `short`, for people; or `auto`, which is short where the output is a terminal.
    """

    def __init__(self, *, throughput: bool, form: str = "auto"):
        self._throughput = throughput
        self._short = sys.stdout.isatty() if form == "auto" else form == "short"

    def write(self, metrics: Metrics) -> None:
        """Print the line of a step or of an evaluation."""
        if self._short:
            say(short_line(metrics))
        elif isinstance(metrics, StepMetrics):
            say(step_line(metrics, datetime.now(), throughput=self._throughput))
        else:
            say(evaluation_lines(metrics))

    def close(self) -> None:
        """Do nothing: no file is held open."""
