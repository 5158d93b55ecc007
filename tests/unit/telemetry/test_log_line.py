"""The log line against the pinned text."""

import math
from datetime import datetime
from pathlib import Path

from megatron_ext.telemetry.log_line import evaluation_lines, step_line
from megatron_ext.telemetry.metrics import SourceLoss, ValidationMetrics
from tests.support.samples import step

NOW = datetime(2026, 8, 22, 10, 0, 0, 123456)
GOLDEN = (Path(__file__).parents[2] / "golden" / "log_line.txt").read_text().rstrip("\n")


def test_the_line_is_the_pinned_one():
    assert step_line(step(), NOW, throughput=True) == GOLDEN


def test_throughput_is_printed_only_when_asked():
    assert step_line(step(), NOW) == GOLDEN.replace(" throughput per GPU (TFLOP/s/GPU): 41.7 |", "")


def test_a_nan_loss_and_a_skipped_step():
    line = step_line(step(lm_loss=math.nan, grad_norm=None, skipped_iterations=2, nan_iterations=1), NOW)
    assert " | lm loss: nan | loss scale: 1.0 | number of skipped iterations:   2 | " in line
    assert line.endswith(" | number of nan iterations:   1 |")
    assert " | lm loss: inf | " in step_line(step(lm_loss=math.inf), NOW)


def test_zeros_and_norm_stand_after_the_gradient_norm():
    line = step_line(step(num_zeros=7, params_norm=12.3456), NOW)
    assert "| grad norm: 2.345 | num zeros: 7 | params norm: 12.346 | number of skipped" in line


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
