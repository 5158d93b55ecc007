"""The log line against the pinned text."""

import math
import os
import pty
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from megatron_ext.telemetry.log_line import Console, evaluation_lines, short_line, step_line
from megatron_ext.telemetry.metrics import SourceLoss, ValidationMetrics
from megatron_ext.terminal import remaining
from tests.support.samples import step
from tests.support.warm_python import warm_python

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


ROOT = Path(__file__).resolve().parents[3]
TRAINING = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --position-embedding-type rope "
    "--mock-data --vocab-size 64 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --num-workers 0 --device cpu "
    "--log-interval 1 --eval-iters 1 --train-iters"
)


@pytest.mark.parametrize("throughput", [False, True])
def test_megatrons_line_has_the_throughput_only_where_it_is_asked_for(
    throughput: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Console(throughput=throughput, form="megatron").write(step())
    assert ("throughput per GPU (TFLOP/s/GPU): 41.7 |" in capsys.readouterr().out) == throughput


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("form", ["auto", "short", "megatron"])
def test_a_terminal_counts_where_the_form_is_left_open(
    form: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    Console(throughput=False, form=form).write(
        ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=1.5)
    )
    short = form == "short" or (form == "auto" and is_terminal)
    assert capsys.readouterr().out.startswith("validation after step 10" if short else "-----")


def test_a_person_is_told_at_the_end_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    for form, told in (("short", True), ("megatron", False)):
        console = Console(throughput=False, form=form, save="runs/mine")
        for iteration, loss in ((50, 2.5), (100, 2.0), (150, 2.25)):
            console.alive(iteration, 200)
            console.write(ValidationMetrics(iteration=iteration, consumed_samples=1, validation_loss=loss))
        capsys.readouterr()
        console.close()
        assert capsys.readouterr().out.splitlines()[:3] == told * [
            "trained  150 of 200 steps",
            "best     validation loss 2.0000, perplexity 7.39, after step 100",
            "files    runs/mine: checkpoints, metrics.jsonl, exit.json",
        ]


def program(*words: str, python: str = sys.executable, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([python, *words], cwd=ROOT, env=environment, text=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]


def test_a_terminal_shows_a_banner_and_short_lines(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    python = warm_python(tmp_path)["PYTHON_EXEC"]
    training = program("pretrain_gpt.py", *TRAINING.split(), "2", python=python, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    lines = shown.decode().splitlines()
    assert training.wait() == 0, lines
    os.close(ours)
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split("   ")[0] for line in steps] == ["step 1/2", "step 2/2"]
    assert "layout  TP 1 x PP 1 x CP 1 x DP 1" in lines
    assert not [line for line in lines if "consumed samples" in line]
    assert lines[-1].startswith("best     validation loss ")


def test_a_terminal_sees_that_steps_go_on_between_logged_ones(tmp_path: Path) -> None:
    """At most once a second, in a line that the next one takes the place of."""
    flags = [*TRAINING.replace("--log-interval 1", "--log-interval 1000").split(), "160"]
    python = warm_python(tmp_path)["PYTHON_EXEC"]
    ours, its = pty.openpty()
    slow = ["--hidden-size", "512", "--seq-length", "256"]  # some 20 ms a step
    training = program("pretrain_gpt.py", *flags, *slow, python=python, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:
        pass
    assert training.wait() == 0, shown
    os.close(ours)
    alive = re.findall(rb"\r\x1b\[Kstep ( *\d+)/160\r", shown)
    assert alive
    assert [int(at) for at in alive] == sorted({int(at) for at in alive})
    assert b"\ntrained  160 of 160 steps\r\n" in shown
