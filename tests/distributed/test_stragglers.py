"""--log-straggler on real ranks: who becomes slow is named in log, TensorBoard and the run's page."""

import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.telemetry.curve import read_history, summary
from megatron_ext.telemetry.jsonl import read_rows
from megatron_ext.telemetry.run_page import run_page
from megatron_ext.verify.ranks import run_ranks
from tests.support.launched import reproducible_rows
from tests.support.program import run_program

COMPUTE, SLOW = 0.015, 0.03  # processor seconds that every rank works at least, and the slow one
SLOW_FROM, STEPS = 24, 44
FLAGS = shlex.split(f"""
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61
    --micro-batch-size 1 --global-batch-size 3 --train-iters {STEPS} --lr 1e-3 --eval-interval 0 --log-interval 4
""")


def train(folder: str, name: str, flags: list[str], slow: bool) -> tuple[int, str]:
    """Rank 1 computes longer from a step on."""
    from megatron_ext.train.trainer import Trainer

    step = Trainer.begin_step

    def slow_step(self: Trainer) -> Any:
        slowed = self.run.rank == 1 and self.run.state.iteration + 1 >= SLOW_FROM
        until = time.thread_time() + (SLOW if slowed else COMPUTE)
        while time.thread_time() < until:
            pass
        return step(self)

    if slow:
        Trainer.begin_step = slow_step
    try:
        ended = run_program(
            [*FLAGS, *flags, "--metrics-file", f"{folder}/{name}.jsonl", "--tensorboard-dir", f"{folder}/{name}"]
        )
    finally:
        Trainer.begin_step = step
    return ended.code, ended.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert [code for code, _ in run_ranks(3, train, str(folder), "plain", [], False)] == [0] * 3
    ends = run_ranks(3, train, str(folder), "watched", ["--log-straggler"], True)
    assert [code for code, _ in ends] == [0] * 3
    (folder / "log").write_text(ends[-1][1])
    return folder


def test_nothing_that_is_trained_changes(folder: Path) -> None:
    assert reproducible_rows(folder / "watched.jsonl") == reproducible_rows(folder / "plain.jsonl")


def test_the_slow_rank_is_named_once_and_in_time(folder: Path) -> None:
    (line,) = re.findall("^straggler .*", (folder / "log").read_text(), re.MULTILINE)
    found = re.fullmatch(
        r"straggler at iteration (\d+): rank 1 \(\S+\) computes (\d\.\d\d) times as long as its peers: (\d+\.\d) ms of "
        r"a step, ranks 0, 2 (\d+\.\d) ms",
        line,
    )
    assert found, line
    assert SLOW_FROM < int(found[1]) < SLOW_FROM + 20, "the twentieth slow step is the last in which it may be"
    assert 1.2 <= float(found[2]) < 2.2


def test_metrics_tensorboard_and_the_page_tell_it(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert {row["slowest_rank"] is None for row in read_rows(folder / "plain.jsonl")} == {True}
    last = list(read_rows(folder / "watched.jsonl"))[-1]["slowest_rank"]
    assert (last["rank"], last["slow"]) == (1, [1])
    tags = [EventAccumulator(str(folder / name)).Reload() for name in ("plain", "watched")]
    added = set(tags[1].Tags()["scalars"]) - set(tags[0].Tags()["scalars"])
    assert added == {"slowest-rank", "slowest-rank-ratio", "slow-ranks"}
    assert [(event.step, event.value) for event in tags[1].Scalars("slow-ranks")][-1] == (STEPS, 1.0)
    history = read_history(folder / "watched.jsonl")
    (said,) = (line for line in summary(history) if line.startswith("slow rank"))
    assert re.fullmatch(rf"slow rank +1, in \d+ rows? from iteration \d+ to {STEPS}", said), said
    assert "Slowest rank" in run_page(history, "run")
    assert "Slowest rank" not in run_page(read_history(folder / "plain.jsonl"), "run")
