"""What each small callback that watches a run does when it hears of a step, of a failure and of the end: on which
ranks, and at which."""

import gc
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.telemetry.communication import ComputeTime
from megatron_ext.telemetry.stragglers import Slowness
from megatron_ext.train.callbacks import communication, stopping, stragglers
from megatron_ext.train.callbacks.communication import Communication, shares_of_all_ranks
from megatron_ext.train.callbacks.garbage import GarbageCollection
from megatron_ext.train.callbacks.profiling import Profiling
from megatron_ext.train.callbacks.replicas import ReplicaCheck
from megatron_ext.train.callbacks.status import Status
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.train.callbacks.stragglers import Stragglers
from megatron_ext.train.shared_numbers import StopVotes
from tests.support.bare_trainer import NOTHING, bare_trainer

# Who asks to stop on this rank, on another one, and what follows: for good (a restart of the launch does not go on), or
# until torchrun starts the ranks again.
STOPS = [
    (None, None, False, None, None),
    ("SIGTERM", None, False, "SIGTERM", True),
    ("SIGTERM", None, True, "SIGTERM", False),
    ("SIGTERM", "SIGTERM", True, "SIGTERM", False),
    (None, "SIGTERM", True, "another rank was asked to stop", False),
    (None, "SIGTERM", False, "another rank was asked to stop", True),
    ("SIGINT", None, True, "SIGINT", True),
    (None, "the file stop", True, "another rank was asked to stop", True),
    ("SIGTERM", "the file stop", True, "SIGTERM", True),
    ("the file stop", "SIGTERM", True, "the file stop", True),
]


def _stopping(
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    other: str | None,
    *,
    late: bool,
    elastic: bool = False,
    overdue: tuple[bool, bool] = (False, False),
    interval: int | None = None,
    iteration: int = 7,
    ranks: int = 2,
) -> tuple[list[tuple[str, bool]], list[str], Any]:
    """The stops that rank 0 of two is told, what the launch remembers, and the signals."""
    remembered: list[str] = []
    monkeypatch.setattr(stopping.launch, "remember_request", remembered.append)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    def of(reason: str | None, is_overdue: bool) -> Stopping:
        signals: Any = SimpleNamespace(requested=reason is not None, reason=reason, for_good=None)
        callback = Stopping(signals, interval, None, elastic=elastic)
        callback.deadline = 1000.0 if is_overdue else 1000.5
        return callback

    callbacks = [of(reason, is_overdue) for reason, is_overdue in zip((own, other), overdue, strict=True)][:ranks]
    trainer = bare_trainer(iteration, world_size=ranks)
    stops: list[tuple[str, bool]] = []
    trainer.stop = lambda reason, by_signal=False: stops.append((reason, by_signal))
    votes = [one.votes() for one in callbacks]
    trainer.stop_votes = StopVotes(*(sum(map(int, vote)) for vote in zip(*votes, strict=True))) if late else None

    def all_reduce(seen: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        others = torch.tensor([[callbacks[1]._asked(), callbacks[1]._is_overdue()]], dtype=seen.dtype)
        together = torch.cat([seen[None], others])
        seen.copy_(together.amax(0) if op == torch.distributed.ReduceOp.MAX else together.sum(0))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce if ranks > 1 else None)
    callbacks[0].on_step_end(trainer, NOTHING)
    return stops, remembered, callbacks[0].signals


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("own", "other", "elastic", "reason", "for_good"), STOPS)
def test_all_ranks_stop_by_what_one_was_asked(
    own: str | None,
    other: str | None,
    elastic: bool,
    reason: str | None,
    for_good: bool | None,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the numbers are read at once or a step later; two that SIGTERM asks are no other signal."""
    stops, remembered, signals = _stopping(monkeypatch, own, other, late=late, elastic=elastic)
    assert stops == ([] if reason is None else [(reason, True)])
    assert signals.for_good is for_good
    assert remembered == ([reason] if for_good else [])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("asked", "overdue", "interval", "iteration", "stops"),
    [
        (None, (True, False), None, 7, [("--exit-duration-in-mins is over", False)]),
        (None, (False, True), None, 7, [("--exit-duration-in-mins is over", False)]),
        (None, (False, False), 7, 7, [("--exit-interval 7", False)]),
        (None, (False, False), 7, 14, [("--exit-interval 7", False)]),
        (None, (False, False), 7, 8, []),
        (None, (False, False), 0, 7, []),
        (None, (True, True), 7, 7, [("--exit-duration-in-mins is over", False)]),
        ("SIGTERM", (True, True), 7, 7, [("SIGTERM", True)]),
    ],
)
def test_other_stops_are_by_no_signal(
    asked: str | None,
    overdue: tuple[bool, bool],
    interval: int | None,
    iteration: int,
    stops: list[tuple[str, bool]],
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _, _ = _stopping(
        monkeypatch, asked, None, late=late, overdue=overdue, interval=interval, iteration=iteration
    )
    assert found == stops


def test_a_rank_that_is_alone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _stopping(monkeypatch, "SIGHUP", None, late=False, ranks=1)[0] == [("SIGHUP", True)]
    assert _stopping(monkeypatch, None, None, late=False, ranks=1)[0] == []


@pytest.mark.parametrize(
    ("reason", "overdue", "votes"),
    [
        (None, False, (0, 0, 0)),
        (None, True, (0, 0, 1)),
        ("SIGTERM", False, (1, 0, 0)),
        ("SIGINT", False, (0, 1, 0)),
        ("the file stop", True, (0, 1, 1)),
    ],
)
def test_a_rank_votes_for_one_kind_of_stop(reason: str | None, overdue: bool, votes: tuple[int, int, int]) -> None:
    signals: Any = SimpleNamespace(requested=reason is not None, reason=reason)
    callback = Stopping(signals, None, None)
    callback.deadline = time.monotonic() - 1.0 if overdue else None
    assert callback.votes() == StopVotes(*votes)


@pytest.mark.parametrize(("begun", "done", "told"), [(None, 4, 5), (5, 4, 5), (6, 4, 5), (5, 5, 5)])
def test_a_failure_is_that_of_the_step_that_was_not_done(begun: int | None, done: int, told: int) -> None:
    """Where numbers are read late, the step after it was begun; an end of a step fails with that step."""
    status, trainer = RunStatus(0), bare_trainer(done)
    status.iteration = begun
    Status(status).on_failure(trainer, KeyboardInterrupt())
    assert status.iteration == told


def test_the_step_that_is_begun_is_on_record() -> None:
    status, trainer = RunStatus(0), bare_trainer(4)
    Status(status).on_step_begin(trainer)
    assert status.iteration == 5


def test_the_clock_runs_around_steps_until_the_end_or_a_failure() -> None:
    heard: list[str] = []
    names = ("start", "stop", "begin_step", "end_step")
    clock: Any = SimpleNamespace(**{name: lambda name=name: heard.append(name) for name in names})
    for end in ("on_end", "on_failure"):
        callback, trainer = Communication(clock), bare_trainer()
        callback.on_start(trainer)
        callback.on_step_begin(trainer)
        callback.on_step_end(trainer, NOTHING)
        getattr(callback, end)(trainer, *([KeyboardInterrupt()] if end == "on_failure" else []))
    assert heard == ["start", "begin_step", "end_step", "stop"] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_are_those_of_the_ranks_together(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(seconds: torch.Tensor) -> None:
        assert ranks > 1
        seconds += torch.tensor([float(ranks), 0.0])

    monkeypatch.setattr(torch.distributed, "all_reduce", add)
    monkeypatch.setattr(communication, "shares", lambda seconds: {"of": seconds.tolist()})
    clock: Any = SimpleNamespace(take=lambda: torch.tensor([1.0, 2.0]))
    found = shares_of_all_ranks(clock, bare_trainer(world_size=ranks).run)
    assert found == {"of": [1.0 + (ranks if ranks > 1 else 0), 2.0]}


def test_the_profiler_hears_of_every_step_and_each_is_a_range() -> None:
    heard: list[Any] = []

    class Range:
        def __init__(self, name: str):
            self.name = name

        def __enter__(self) -> None:
            heard.append(f"begin {self.name}")

        def __exit__(self, *_: object) -> None:
            heard.append(f"end {self.name}")

    profiler: Any = SimpleNamespace(before_step=heard.append, finish=lambda: heard.append("finish"))
    for ranges in (None, Range):
        callback, trainer = Profiling(profiler, ranges), bare_trainer(4)
        for trainer.run.state.iteration in (4, 5):
            callback.on_step_begin(trainer)
            callback.on_step_end(trainer, NOTHING)
        callback.on_step_end(trainer, NOTHING)
        callback.on_end(trainer)
    steps = [5, "begin step 5", "end step 5", 6, "begin step 6", "end step 6"]
    assert heard == [5, 6, "finish", *steps, "finish"], "no range is ended twice"


def test_replicas_are_not_compared_where_no_interval_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for off in (None, 0):
        assert ReplicaCheck(off, off)._checks == []
        assert [interval for interval, _ in ReplicaCheck(off, 3)._checks] == [3]


def test_garbage_that_was_there_is_collected_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen first would be kept, garbage and all."""
    done: list[str] = []
    for name in ("disable", "collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: done.append(name))
    GarbageCollection(0, 0).on_start(NOTHING)
    assert done == ["disable", "collect", "freeze"]
    assert not GarbageCollection(1, 1).ends_before_next(NOTHING)


def _slow(ranks: int, last: bool = True) -> tuple[Any, list[tuple[Any, ...]]]:
    """The callback of a run of some ranks, and what is compared of each step."""
    run: Any = SimpleNamespace(
        world_size=ranks, is_last_rank=last, device=SimpleNamespace(torch_device=torch.device("cpu"))
    )
    compared: list[tuple[Any, ...]] = []
    callback: Any = Stragglers(NOTHING, run)
    callback._ranks = SimpleNamespace(
        slow=set(), slowest=None, add=lambda *given: (compared.append(given), ([], []))[1]
    )
    return callback, compared


def test_times_of_an_exchange_are_those_of_each_step_of_each_rank() -> None:
    """Three ranks send three times of two steps: number, step and rank are digits of each."""
    callback, compared = _slow(3)
    sent = torch.tensor(
        [[[100.0 * kind + 10 * step + rank for kind in (1, 2, 3)] for step in (0, 1)] for rank in range(3)]
    )
    callback._under_way.append(SimpleNamespace(times=lambda device: sent.flatten()))
    callback._read(2)
    assert compared == [
        ([200.0, 201.0, 202.0], [100.0, 101.0, 102.0], [300.0, 301.0, 302.0]),
        ([210.0, 211.0, 212.0], [110.0, 111.0, 112.0], [310.0, 311.0, 312.0]),
    ]


def test_an_exchange_that_is_not_there_yet_is_read_later() -> None:
    callback, compared = _slow(2)
    found: list[torch.Tensor | None] = [None, torch.zeros(12), torch.zeros(12)]
    callback._under_way.extend([SimpleNamespace(times=lambda device: found.pop(0))] * 2)
    callback.on_step_end(bare_trainer(1), NOTHING)
    assert compared == []
    callback.on_end(bare_trainer(1))
    assert len(compared) == 4


def test_what_is_sent_are_the_two_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step; the first three, and those whose time is not known, are no numbers."""
    sent: list[list[float]] = []

    def gather(times: torch.Tensor, own: torch.Tensor, async_op: bool) -> Any:
        assert (async_op, times.shape) == (True, (12,))
        sent.append(own.tolist())
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    callback, _ = _slow(2)
    callback._read = lambda iteration: None
    known = iter(([1], [2, 3], [4], [5, 6, 7, 8], [9]))
    callback._clock = SimpleNamespace(
        take_compute=lambda: [ComputeTime(float(step), step + 0.25, step + 0.5) for step in next(known)]
    )
    for iteration in range(1, 11):
        callback.on_step_end(bare_trainer(iteration), NOTHING)

    def times(*steps: int | None) -> list[float]:
        return [math.nan if step is None else step + part for step in steps for part in (0.0, 0.25, 0.5)]

    expected = [times(None, None), times(None, None), times(4, None), times(6, 7), times(8, 9)]
    assert [str(one) for one in sent] == [str(one) for one in expected]


@pytest.mark.parametrize("last", [False, True])
def test_one_rank_says_who_became_slow_and_who_no_longer_is(last: bool, capsys: pytest.CaptureFixture[str]) -> None:
    callback, _ = _slow(2, last)
    own = Slowness(1, 1.5, 0.003, 0.002, (0,))
    shared = Slowness(0, 1.25, 0.005, 0.004, (1,), 0.5, 0.75)
    slow_core = Slowness(0, 1.25, 0.005, 0.004, (1, 2), 0.75, 0.5)
    callback._ranks.add = lambda *_: ([own, shared, slow_core], [own, shared])
    callback._hosts = ["a", "b"]
    callback._under_way.append(SimpleNamespace(times=lambda device: torch.zeros(12)))
    callback._read(7)
    said = capsys.readouterr().out.splitlines()
    times = "1.25 times as long as its peers: 5.0 ms of a step,"
    once = [
        "straggler at iteration 7: rank 1 (b) computes 1.50 times as long as its peers: 3.0 ms of a step, "
        "rank 0 2.0 ms",
        f"straggler at iteration 7: rank 0 (a) shares its core, which it had 50% of the time, and computes {times} "
        "rank 1 4.0 ms",
        "straggler at iteration 7: rank 0 (a) has a slower core than its peers, 50% of their speed, and computes "
        f"{times} ranks 1-2 4.0 ms",
        "straggler at iteration 7: rank 1 (b) computes as long as its peers again",
        "straggler at iteration 7: rank 0 (a) computes as long as its peers again by the clock",
    ]
    assert said == (once * 2 if last else [])


def test_ranks_are_compared_within_their_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stages and machines that all tell once."""

    def gather(found: list[Any], own: Any) -> None:
        assert (own, len(found)) == (("here", 1), 4)
        found[:] = [("a", 0), ("b", 1), ("here", 1), ("c", 0)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(stragglers.socket, "gethostname", lambda: "here")
    made: list[list[int]] = []
    monkeypatch.setattr(stragglers, "SlowRanks", lambda stages: made.append(list(stages)))
    run: Any = SimpleNamespace(world_size=4, groups=SimpleNamespace(pp=SimpleNamespace(rank=lambda: 1)))
    callback = Stragglers(NOTHING, run)
    callback.on_start(NOTHING)
    assert made == [[], [0, 1, 1, 0]]
    assert callback._hosts == ["a", "b", "here", "c"]


def test_times_are_read_when_the_device_has_copied_them() -> None:
    """All have sent theirs before that; the copy is begun once."""
    heard: list[str] = []
    passed = iter((False, True))
    device: Any = SimpleNamespace(
        mark=lambda: heard.append("mark") or "mark", has_passed=lambda mark: heard.append(mark) or next(passed)
    )
    sent = torch.ones(3)
    exchange = stragglers._Exchange(SimpleNamespace(wait=lambda: heard.append("wait")), sent)
    assert exchange.times(device) is None
    found = exchange.times(device)
    assert found is not None
    assert found.tolist() == [1.0] * 3
    assert heard == ["wait", "mark", "mark", "mark"]
