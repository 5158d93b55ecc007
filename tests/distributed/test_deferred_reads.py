"""Numbers that are read a step later, as on a GPU, change nothing that one sees: losses, weights, files, what is said.

On CPU processes a device that says of itself that reads wait stands in for a GPU.
"""

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_ext.device.cpu import CpuDevice
from megatron_ext.errors import StoppedBySignal
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.train.trainer import Callback
from tests.support.both_ways import ALONE, OF_LAYOUTS, BothWays, trained_both_ways, trainer_of
from tests.support.launched import reproducible_rows
from tests.support.losses import layouts
from tests.support.program import Ended, run_program, tiny
from tests.support.several_models import in_turn

FLAGS = tiny("--lr 1e-2 --train-iters 10")
ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CASES = {
    "Lion": (1, "--optimizer lion --lr 1e-3 --clip-grad 0.1"),
    "not clipped": (1, "--clip-grad 0"),
    "ZeRO-1": (2, f"{ZERO_1} --bf16 --clip-grad 0.01"),
    "depths on three ranks": (
        3,
        "--mtp-num-layers 2 --position-embedding-type rope --bf16 --global-batch-size 6 --micro-batch-size 1",
    ),
    "PP2, experts": (2, "--pipeline-model-parallel-size 2 --num-experts 2 --disable-bias-linear --bf16"),
}
AT_ONCE = [
    "--fp16",
    "--bf16 --loss-scale 8",
    "--optimizer sgd",
    "--exp-avg-dtype bf16",
    "--optimizer-cpu-offload",
    "--use-torch-fsdp2 --torch-fsdp2-cpu-offload",
    "--log-num-zeros-in-grad",
    "--qk-clip --disable-bias-linear",
    "--check-before-update",
]
"""Flags with which the numbers are needed before the update."""


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_equal_to_the_bit(case: str) -> None:
    ranks, flags = CASES[case]
    for at_once, late in run_ranks(ranks, trained_both_ways, " ".join([*FLAGS, flags])):
        assert late[:2] == at_once[:2]
        assert (late.ahead, at_once.ahead) == ([1] * 9 + [0], [0] * 10)
        assert len({step[1] for step in late.steps}) == 10


def _both_of_layout(name: str) -> BothWays:
    layout = layouts.DEFAULT[name]
    return trained_both_ways(f"{OF_LAYOUTS} {layouts.MODELS[layout.model]} {layout.flags}")


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_every_layout_of_the_comparison_is_the_same_both_ways(ranks: int) -> None:
    """Some need their numbers before the update, whatever the device: a loss scale, what is updated in host memory,
    and SGD, whose update cannot be masked."""
    names = [name for name, layout in layouts.DEFAULT.items() if layout.ranks == ranks]
    for found in run_ranks(ranks, in_turn, _both_of_layout, names, timeout=550):
        for name, (at_once, late) in zip(names, found, strict=True):
            assert late[:2] == at_once[:2], name
            needs_them = any(word in name for word in ("fp16", "host memory", "SGD"))
            assert late.ahead == ([0, 0, 0] if needs_them else [1, 1, 0]), name
            assert len(at_once.steps) == 3


def _reads_late(flags: str) -> bool:
    return trainer_of([*FLAGS, *ALONE.split(), *flags.split()], late=True)._guard is not None


def test_what_needs_the_numbers_before_the_update_gets_them() -> None:
    [found] = run_ranks(1, in_turn, _reads_late, ["", *AT_ONCE])
    assert found == [True] + [False] * len(AT_ONCE)


def _program(flags: list[str], late: bool) -> Ended:
    CpuDevice.reads_wait = late
    return run_program(flags)


def _ran(flags: list[str], save: Path, late: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of metrics, and the last rank's lines, without what a clock or memory gives."""
    ended = run_ranks(2, _program, [*FLAGS, "--save", str(save), "--use-distributed-optimizer", *flags], late)
    assert [one.code for one in ended] == [0, 0], ended[0].errors
    measured = re.compile(r"^ \[[-0-9:. ]+\]|elapsed time per iteration \(ms\): [0-9.]+")
    lines = [measured.sub("", line) for line in ended[-1].output.splitlines()]
    return reproducible_rows(save / "metrics.jsonl"), lines


SAVES = shlex.split("--save-interval 4 --eval-interval 3 --eval-iters 1 --log-interval 2 --log-params-norm")


def test_files_and_lines_of_a_run_are_the_same(tmp_path: Path) -> None:
    """Saves, evaluations and lines fall on steps of their own, and together."""
    flags = [*SAVES, "--exit-interval", "8"]
    at_once, late = (_ran(flags, tmp_path / str(late), late) for late in (False, True))
    assert late == at_once
    assert [row["iteration"] for row in late[0] if "lm_loss" in row] == [1, 2, 4, 6, 8]
    assert [row["iteration"] for row in late[0] if "validation_loss" in row] == [3, 6]


# Slow: four runs; the cases above compare state and metrics of both ways.
@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same(tmp_path: Path) -> None:
    at_once, _ = _ran(SAVES, tmp_path / "at once", late=False)
    for late, iterations in ((True, "4"), (False, "8"), (True, "10")):
        folder = tmp_path / "late"
        begun = ["--load", str(folder)] if folder.exists() else []
        rows, _ = _ran([*SAVES, *begun, "--exit-interval", iterations], folder, late)
    assert rows == at_once


class Stopped(NamedTuple):
    """How a run ended that was asked to stop while its third step was computed."""

    message: str
    iteration: int
    heard: list[int]
    """Iterations whose end was told."""


def _stopped(flags: list[str]) -> Stopped:
    heard: list[int] = []

    class Asks(Callback):
        def before_update(self, trainer: Any) -> None:
            if trainer.run.rank == 1 and trainer.position.iteration == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def ends_before_next(self, trainer: Any) -> bool:
            return False

        def on_step_end(self, trainer: Any, result: Any) -> None:
            heard.append(trainer.run.state.iteration)

    with SignalWatcher() as signals:
        trainer = trainer_of(flags, True, [Asks(), Stopping(signals, None, None)])
        with pytest.raises(StoppedBySignal) as raised:
            trainer.fit()
    trainer.run.loaders.close()
    return Stopped(str(raised.value), trainer.run.state.iteration, heard)


def test_a_signal_stops_all_ranks_after_the_same_step() -> None:
    """It comes in the third step and votes in it or in the fourth, whose numbers are read when the next is begun."""
    [first, second] = run_ranks(2, _stopped, [*FLAGS, *ALONE.split()])
    assert first.iteration == second.iteration
    assert first.iteration in (4, 5)
    assert first.heard == second.heard == list(range(1, first.iteration + 1))
    assert "SIGTERM" in second.message
