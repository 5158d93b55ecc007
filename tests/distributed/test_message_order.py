"""Pipelines finish on GPUs: what ranks issue in a step, replayed on NCCL's streams (no GPU takes part).

One process plays each rank in turn: its messages and collectives return at once, with whatever was in the memory. What
a rank issues does not depend on it, as a comparison with real ranks shows.
"""

import shlex
from dataclasses import dataclass

import pytest

from benchmarks.rehearsed_world import played
from megatron_ext import device
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.train.build import build_run
from megatron_ext.train.configure import configure
from megatron_ext.train.trainer import Trainer
from tests.support.replayed_messages import Event, Recorder, unfinished

MODEL = """
    --num-layers {layers} --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 61
    --micro-batch-size 1 --train-iters 2 --lr 1e-3 --eval-interval 0 --hidden-dropout 0 --attention-dropout 0
    --device cpu --overlap-grad-reduce --no-check-for-nan-in-loss-and-grad
"""
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
SCHEDULES = {
    "1f1b": "",
    "interleaved": TWO_CHUNKS,
    "interleaved, waiting for each message": f"{TWO_CHUNKS} --no-overlap-p2p-communication",
    "zbv": f"{TWO_CHUNKS} --pipeline-schedule zbv",
    "dualpipe-v": f"{TWO_CHUNKS} --pipeline-schedule dualpipe-v",
}


@dataclass(frozen=True)
class Case:
    stages: int
    schedule: str
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    def flags(self) -> list[str]:
        pipeline = f"--pipeline-model-parallel-size {self.stages} --global-batch-size {2 * self.ranks}"
        return shlex.split(f"{MODEL.format(layers=2 * self.stages)} {pipeline} {SCHEDULES[self.schedule]}")


CASES = [
    Case(stages, schedule)
    for stages in range(2, 9)
    for schedule in SCHEDULES
    if stages > 2 or schedule != "interleaved, waiting for each message"  # two stages need the overlap
]
CASES += [Case(stages, schedule, replicas=2) for stages in (2, 4) for schedule in ("1f1b", "interleaved", "zbv")]


def recorded(case: Case) -> list[Event]:
    """What this rank issues in one step."""
    run = build_run(configure(case.flags()).config, device.install("cpu"))
    recorder = Recorder(batches=case.schedule == "1f1b")
    with recorder.recording():
        Trainer(run, []).step()
    return recorder.events


def all_played(cases: list[Case]) -> list[list[list[Event]]]:
    """What every rank of each case issues, case by case."""
    found = []
    for case in cases:
        found.append([])
        for rank in range(case.ranks):
            with played(rank, case.ranks):
                found[-1].append(recorded(case))
    return found


@pytest.mark.full
def test_ranks_finish_on_one_stream_a_group_and_on_one_a_pair() -> None:
    for case, by_rank in zip(CASES, run_ranks(1, all_played, CASES)[0], strict=True):
        assert {"send", "recv", "all", "wait"} <= {event.kind for own in by_rank for event in own}
        for pairs_apart in (False, True):
            assert unfinished(by_rank, pairs_apart=pairs_apart) == [], (case, pairs_apart)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_played_rank_issues_what_a_real_one_does(schedule: str) -> None:
    """Messages, and when each is waited for; ranks that are played exchange no Python objects."""
    case = Case(2, schedule)
    [as_played] = run_ranks(1, all_played, [case])[0]
    assert [messages(own) for own in as_played] == [messages(own) for own in run_ranks(2, recorded, case)]


def messages(events: list[Event]) -> list[Event]:
    of_messages = {event.operation for event in events if event.kind in ("send", "recv")}
    return [event for event in events if event.operation in of_messages]


def message(kind: str, number: int, peer: int) -> Event:
    return Event(kind, number, "0", (0, 1), peer)


@pytest.mark.parametrize("pairs_apart", [False, True])
def test_ranks_that_both_send_first_never_finish(pairs_apart: bool) -> None:
    events = [[message("send", 1, 1 - rank), message("recv", 2, 1 - rank)] for rank in range(2)]
    stuck = [(rank, event) for rank, own in enumerate(events) for event in own]
    assert unfinished(events, pairs_apart=pairs_apart) == stuck
    batches = [[event._replace(operation=1) for event in own] for own in events]
    assert unfinished(batches, pairs_apart=pairs_apart) == []


def test_a_stream_for_each_pair_finishes_what_one_for_the_group_does_not() -> None:
    """Around a ring, each sends before it receives."""
    steps = (("send", 1), ("recv", 2))
    ring = [
        [Event(kind, number, "0", (0, 1, 2), (rank + step) % 3) for number, (kind, step) in enumerate(steps)]
        for rank in range(3)
    ]
    assert len(unfinished(ring, pairs_apart=False)) == 6
    assert unfinished(ring, pairs_apart=True) == []


def test_what_is_computed_after_a_wait_is_issued_after_it() -> None:
    """Rank 0 sends what it computes from what rank 1 sends only afterwards."""
    late = [
        [message("recv", 1, 1), Event("wait", 1), message("send", 2, 1)],
        [message("recv", 1, 0), Event("wait", 1), message("send", 2, 0)],
    ]
    assert len(unfinished(late, pairs_apart=False)) == 4
    late[1] = [message("send", 1, 0), message("recv", 2, 0)]
    assert unfinished(late, pairs_apart=False) == []
