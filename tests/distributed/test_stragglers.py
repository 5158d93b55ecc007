"""--log-straggler on real ranks: who becomes slow is named in log, TensorBoard and the run's page."""

import itertools
import re
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import environment
from megatron_ext.telemetry.communication_clock import CommunicationClock, ComputeTime
from megatron_ext.telemetry.loss_curve import read_history, summary
from megatron_ext.telemetry.run_page import run_page
from megatron_ext.train.trainer import Trainer
from megatron_ext.untrusted.metrics_rows import read_rows
from megatron_ext.verify.ranks import run_ranks
from tests.support.launched import reproducible_rows
from tests.support.program import run_program

COMPUTE, SLOW = 0.015, 0.03  # seconds of a step that every rank computes, and the slow one
SLOW_FROM, STEPS = 24, 44
FLAGS = shlex.split(f"""
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61
    --micro-batch-size 1 --global-batch-size 3 --train-iters {STEPS} --lr 1e-3 --eval-interval 0 --log-interval 4
""")


def train(folder: str, name: str, flags: list[str], how: str = "") -> tuple[int, str]:
    """Rank 1 computes longer from a step on, by what its clock says ("told") or in fact ("real")."""
    rank, steps = environment.rank(), itertools.count(1)
    step, compute_time = Trainer.begin_step, CommunicationClock._compute_time

    def told(self: CommunicationClock, step: Any, seconds: float) -> ComputeTime:
        seconds = SLOW if rank == 1 and next(steps) >= SLOW_FROM else COMPUTE
        return ComputeTime(seconds, seconds, 3e-5)

    def real(self: Trainer) -> Any:
        slowed = rank == 1 and self.run.state.iteration + 1 >= SLOW_FROM
        until = time.thread_time() + (SLOW if slowed else COMPUTE)
        while time.thread_time() < until:
            pass
        return step(self)

    if how == "told":
        CommunicationClock._compute_time = told
    if how == "real":
        Trainer.begin_step = real
    try:
        ended = run_program(
            [*FLAGS, *flags, "--metrics-file", f"{folder}/{name}.jsonl", "--tensorboard-dir", f"{folder}/{name}"]
        )
    finally:
        Trainer.begin_step, CommunicationClock._compute_time = step, compute_time
    return ended.code, ended.output


def straggler_lines(ends: list[tuple[int, str]]) -> list[str]:
    assert [code for code, _ in ends] == [0] * 3
    return re.findall("^straggler .*", ends[-1][1], re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert straggler_lines(run_ranks(3, train, str(folder), "plain", [])) == []
    lines = straggler_lines(run_ranks(3, train, str(folder), "watched", ["--log-straggler"], "told"))
    (folder / "lines").write_text("\n".join(lines))
    return folder


def test_nothing_that_is_trained_changes(folder: Path) -> None:
    assert reproducible_rows(folder / "watched.jsonl") == reproducible_rows(folder / "plain.jsonl")


def test_the_slow_rank_is_named_once_and_in_time(folder: Path) -> None:
    """Its eleventh slow step is exchanged with the one after it, at the end of the next, and read at the end of
    another one."""
    named = SLOW_FROM + 10 + 3
    assert (folder / "lines").read_text() == (
        f"straggler at iteration {named}: rank 1 ({socket.gethostname()}) computes 2.00 times as long as its peers: "
        "30.0 ms of a step, ranks 0, 2 15.0 ms"
    )


@pytest.mark.slow  # by the machine's own clock: other programs must leave three ranks their cores
def test_a_rank_that_is_slow_indeed_is_named(tmp_path: Path) -> None:
    (line,) = straggler_lines(run_ranks(3, train, str(tmp_path), "real", ["--log-straggler"], "real"))
    found = re.match(r"straggler at iteration (\d+): rank 1 \(\S+\) computes (\d\.\d\d) times as long", line)
    assert found, line
    assert SLOW_FROM < int(found[1]) < SLOW_FROM + 20, "the twentieth slow step is the last in which it may be"
    assert 1.2 <= float(found[2]) < 2.2


def test_metrics_tensorboard_and_the_page_tell_it(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert {row["slowest_rank"] is None for row in read_rows(folder / "plain.jsonl")} == {True}
    last = list(read_rows(folder / "watched.jsonl"))[-1]["slowest_rank"]
    assert last == {"rank": 1, "ratio": 2.0, "slow": [1]}
    tags = [EventAccumulator(str(folder / name)).Reload() for name in ("plain", "watched")]
    added = set(tags[1].Tags()["scalars"]) - set(tags[0].Tags()["scalars"])
    assert added == {"slowest-rank", "slowest-rank-ratio", "slow-ranks"}
    assert [(event.step, event.value) for event in tags[1].Scalars("slow-ranks")][-1] == (STEPS, 1.0)
    history = read_history(folder / "watched.jsonl")
    (said,) = (line for line in summary(history) if line.startswith("slow rank"))
    assert re.fullmatch(rf"slow rank +1, in \d+ rows? from iteration \d+ to {STEPS}", said), said
    assert "Slowest rank" in run_page(history, "run")
    assert "Slowest rank" not in run_page(read_history(folder / "plain.jsonl"), "run")
