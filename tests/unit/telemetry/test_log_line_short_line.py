"""The line of a step for people."""

import pytest

from megatron_ext.telemetry.log_line import short_line
from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.terminal import remaining
from tests.support.samples import step


def test_the_short_line() -> None:
    assert short_line(step()) == "step  10/100   loss 9.8451   norm 2.345       3,278 tokens/s   0:28 left"
    last = step(iteration=100, skipped_iterations=2, nan_iterations=1)
    assert short_line(last) == "step 100/100   loss 9.8451   norm 2.345       3,278 tokens/s   done   2 skipped   1 NaN"
    known = step(mfu=0.4123, peak_memory_bytes=52_149_000_000, grad_norm=None)
    assert short_line(known) == "step  10/100   loss 9.8451       3,278 tokens/s   41.2% MFU   52.1 GB   0:28 left"
    evaluation = ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=1.5)
    assert short_line(evaluation) == "validation after step 10   loss 1.5000   perplexity 4.48"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (725, "12:05"),
        (12000, "3:20:00"),
        (42.5, "0:42"),
        (43.5, "0:44"),
        (3599.4, "59:59"),
        (3600, "1:00:00"),
        (86399, "23:59:59"),
        (86400, "1 day 0:00:00"),
        (86405, "1 day 0:00:05"),
        (2 * 86400, "2 days 0:00:00"),
        (2.6e5, "3 days 0:13:20"),
    ],
)
def test_remaining_time(seconds: float, text: str) -> None:
    assert remaining(seconds) == text


def test_the_last_step_is_done_and_the_one_before_is_not() -> None:
    assert short_line(step(iteration=99, elapsed_ms=1500.0)).endswith("   0:02 left")
    assert short_line(step(iteration=100)).endswith("   done")
    assert short_line(step(iteration=7, train_iters=9)).startswith("step 7/9   loss")
    assert "   1 skipped" in short_line(step(skipped_iterations=1))
    assert "NaN" not in short_line(step(skipped_iterations=1))
    assert short_line(step(nan_iterations=3)).endswith("left   3 NaN")
