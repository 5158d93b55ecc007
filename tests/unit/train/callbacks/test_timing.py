"""--timing-log-level: times of the parts of a step are means over the steps since the last line."""

import re
import time

import pytest

from megatron_ext.telemetry.timers import Timers
from megatron_ext.train.callbacks.timing import Timing
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Trainer
from tests.support.small_runs import built

RESULT = StepResult(1.0, 64, 4, True, 0.5, 1.0, None)


def test_times_are_of_the_steps_since_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that goes on from step 4 has two steps until step 6, then three."""
    with built() as run:
        timers = Timers(1, lambda: None)
        callback, trainer = Timing(timers, 3), Trainer(run, [])
        lines = []
        for run.state.iteration in range(5, 10):
            timer = timers("forward-backward", log_level=1)
            timer.start()
            time.sleep(0.03)
            timer.stop()
            callback.on_step_end(trainer, RESULT)
            lines.append(capsys.readouterr().out)
    assert [bool(line) for line in lines] == [False, True, False, False, True]
    for line in (lines[1], lines[4]):
        milliseconds = [float(number) for number in re.findall(r"\d+\.\d+", line)]
        assert all(number >= 30.0 for number in milliseconds), line
