"""The log line against the pinned text."""

import math
from datetime import datetime
from pathlib import Path

import pytest

from megatron_ext.telemetry import log_line
from megatron_ext.telemetry.log_line import evaluation_lines, short_line, step_line
from megatron_ext.telemetry.metrics import SourceLoss, ValidationMetrics
from megatron_ext.terminal import remaining
from tests.support.samples import step

NOW = datetime(2026, 8, 22, 10, 0, 0, 123456)
GOLDEN = (Path(__file__).parents[2] / "golden" / "log_line.txt").read_text().rstrip("\n")


def test_the_line_is_the_pinned_one():
    assert step_line(step(), NOW, throughput=True) == GOLDEN


def test_a_nan_loss_and_a_skipped_step():
    line = step_line(step(lm_loss=math.nan, grad_norm=None, skipped_iterations=2, nan_iterations=1), NOW)
    assert " | lm loss: nan | loss scale: 1.0 | number of skipped iterations:   2 | " in line
    assert line.endswith(" | number of nan iterations:   1 |")
    assert " | lm loss: inf | " in step_line(step(lm_loss=math.inf), NOW)


def test_evaluation_lines():
    lines = evaluation_lines(ValidationMetrics(iteration=100, consumed_samples=1600, validation_loss=9.1))
    text = " validation loss at iteration 100 | lm loss value: 9.100000E+00 | lm loss PPL: 8.955293E+03 | "
    assert lines.split("\n") == ["-" * (len(text) + 1), text, "-" * (len(text) + 1)]


def test_several_validation_sources_come_before_all_of_them():
    sources = (SourceLoss(name="data/a", suffix="0", loss=1.0), SourceLoss(name="data/b", suffix="1", loss=2.0))
    lines = evaluation_lines(
        ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=1.5, sources=sources)
    ).split("\n")
    assert lines[1] == " validation-0 loss at iteration 10 | lm loss value: 1.000000E+00 | lm loss PPL: 2.718282E+00 | "
    assert lines[4].startswith(" validation-1 loss at iteration 10 | lm loss value: 2.000000E+00 |")
    assert lines[7].startswith(" validation loss at iteration 10 | lm loss value: 1.500000E+00 |")
    assert lines[0] == lines[2] == lines[3] == lines[5] == "-" * (len(lines[1]) + 1)


def test_validation_perplexity_is_capped_and_keeps_nan():
    def line(loss: float) -> str:
        return evaluation_lines(ValidationMetrics(iteration=1, consumed_samples=1, validation_loss=loss)).split("\n")[1]

    assert "lm loss PPL: 4.851652E+08 | " in line(25.0)
    assert "lm loss value: nan | lm loss PPL: nan | " in line(math.nan)


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


@pytest.mark.parametrize(
    ("tflops", "text"), [(41.66, "41.7"), (0.1, "0.1"), (0.0123, "0.012"), (4.3e-5, "0.000043"), (0.0, "0.0")]
)
def test_a_small_throughput_has_two_digits(tflops: float, text: str) -> None:
    assert log_line._tflops(tflops) == text
