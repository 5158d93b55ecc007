"""What a person sees: short lines and a banner; a reader that leaves; --help with a word."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.telemetry.log_line import Console
from megatron_ext.telemetry.metrics import ValidationMetrics
from tests.support.samples import step
from tests.support.warm_python import warm_python

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


def shown_by(training: subprocess.Popen[str], ours: int) -> bytes:
    """Return what a training, which must succeed, writes to a terminal of ours."""
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    assert training.wait() == 0, shown
    os.close(ours)
    return shown


def test_a_terminal_shows_a_banner_and_short_lines(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    python = warm_python(tmp_path)["PYTHON_EXEC"]
    training = program("pretrain_gpt.py", *TRAINING.split(), "2", python=python, stdout=its, stderr=its)
    os.close(its)
    lines = shown_by(training, ours).decode().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split("   ")[0] for line in steps] == ["step 1/2", "step 2/2"]
    assert "layout  TP 1 x PP 1 x CP 1 x DP 1" in lines
    assert not [line for line in lines if "consumed samples" in line]
    assert lines[-1].startswith("best     validation loss ")


SLOW = """import sys, time
from megatron_ext.cli.pretrain import start

def rests():
    from megatron_ext.train.trainer import Callback

    class Rests(Callback):
        def on_step_begin(self, trainer):
            time.sleep(0.2)

    return Rests()

start(sys.argv[1:], callbacks=[rests])
"""
"""The program, with steps that take a fifth of a second."""


def test_a_terminal_sees_that_steps_go_on_between_logged_ones(tmp_path: Path) -> None:
    """At most once a second, in a line that the next one takes the place of."""
    flags = [*TRAINING.replace("--log-interval 1", "--log-interval 1000").split(), "12"]
    python = warm_python(tmp_path)["PYTHON_EXEC"]
    (tmp_path / "slow.py").write_text(SLOW)
    ours, its = pty.openpty()
    training = program(str(tmp_path / "slow.py"), *flags, python=python, stdout=its, stderr=its)
    os.close(its)
    shown = shown_by(training, ours)
    alive = re.findall(rb"\r\x1b\[Kstep ( *\d+)/12 \[#*-*\]\r", shown)
    assert 0 < len(alive) < 12
    assert [int(at) for at in alive] == sorted({int(at) for at in alive})
    assert b"\ntrained  12 of 12 steps\r\n" in shown
