"""What --record-schedule writes down of one rank, by a clock of the test's: two microbatches through two chunks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.plan.timeline import COMMUNICATION, MESSAGES, Block, Pass
from megatron_ext.telemetry import communication_clock, schedule_recorder
from megatron_ext.telemetry.schedule_recorder import ScheduleRecorder


class Clock:
    """A clock that moves when it is told, and the device that is read by it."""

    def __init__(self) -> None:
        self.now, self.held = 100.0, 0
        self.waited_for: list[str] = []

    def mark(self) -> float:
        return self.now

    def seconds_between(self, first: float, last: float) -> float:
        return last - first

    def synchronize(self) -> None:
        self.waited_for.append("device")

    def seconds_without_processor(self) -> float:
        return 0.0

    seconds_of_a_fixed_loop = seconds_without_processor

    def memory(self) -> Any:
        return SimpleNamespace(allocated=self.held, max_allocated=10**9, reserved=10**10)


class Group:
    """Stands for torch's class: each method takes a second."""

    clock: Clock

    def __init__(self, name: str):
        self.group_name = name

    def send(self) -> "Work":
        self.clock.now += 1.0
        return Work()

    def allreduce(self) -> "Work":
        self.clock.now += 2.0
        return Work()


class Work:
    def wait(self) -> None:
        Group.clock.now += 0.25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(Group, "clock", found, raising=False)
    monkeypatch.setattr(communication_clock, "ProcessGroup", Group)
    monkeypatch.setattr(communication_clock, "Work", Work)
    monkeypatch.setattr(schedule_recorder, "time", SimpleNamespace(perf_counter=found.mark))
    everyone = {"of": [("here", 0.5), ("here", 0.0), ("elsewhere", -50.0)]}  # machine, and seconds after the first
    monkeypatch.setattr(schedule_recorder, "_machine", lambda: "here")

    def gather(into: list[Any], own: tuple[str, float]) -> None:
        assert own == ("here", found.now)
        into[:] = [(machine, found.now - 0.5 + late) for machine, late in everyone["of"]]

    monkeypatch.setattr(torch.distributed, "barrier", lambda: found.waited_for.append("others"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return found


def run_step(recorder: ScheduleRecorder, clock: Clock, chunks: list[torch.nn.Module], iteration: int) -> None:
    """Forward passes of both chunks for two microbatches, each of a second; backward in the opposite order."""
    timers = recorder.timers(None)
    weight = torch.ones((), requires_grad=True)

    def forward_step(batches: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, str]:
        clock.now += 1.0
        clock.held += 100
        return weight * 2.0, "loss"

    watched = recorder.watched(forward_step)
    recorder.begin_step()
    outputs = []
    for _ in range(2):
        for chunk in chunks:
            timers("forward-compute", log_level=2).start()
            output, loss = watched(iter(()), chunk)
            timers("forward-compute").stop()
            assert loss == "loss"
            outputs.append(output)
    for output in reversed(outputs):
        timers("backward-compute", log_level=2).start()
        output.backward()
        clock.now += 2.0
        clock.held -= 100
        timers("backward-compute").stop()
    Group("stages").send().wait()
    Group("data").send().wait()
    Group("data").allreduce().wait()
    timers("optimizer", log_level=1).start()
    timers("optimizer").stop()
    recorder.end_step(iteration)


def test_each_pass_has_its_microbatch_and_chunk_in_every_step(clock: Clock) -> None:
    chunks: list[torch.nn.Module] = [torch.nn.Identity(), torch.nn.Identity()]
    recorder = ScheduleRecorder(clock, Group("stages"), chunks)  # pyright: ignore[reportArgumentType]
    run_step(recorder, clock, chunks, 5)
    assert clock.waited_for == ["device", "others", "device", "device", "device"]
    clock.now += 1000.0
    run_step(recorder, clock, chunks, 6)
    # Half a second after the first rank of this machine; the clock of another machine says nothing.
    passes = (
        Pass(True, 0, 0, 0.5, 1.5),
        Pass(True, 1, 0, 1.5, 2.5),
        Pass(True, 0, 1, 2.5, 3.5),
        Pass(True, 1, 1, 3.5, 4.5),
        Pass(False, 1, 1, 4.5, 6.5),
        Pass(False, 0, 1, 6.5, 8.5),
        Pass(False, 1, 0, 8.5, 10.5),
        Pass(False, 0, 0, 10.5, 12.5),
    )
    blocks = (
        Block(MESSAGES, 12.5, 13.5),
        Block(MESSAGES, 13.5, 13.75),
        Block(COMMUNICATION, 13.75, 14.75),  # a message of another group, such as the ring of context parallelism
        Block(COMMUNICATION, 14.75, 15.0),
        Block(COMMUNICATION, 15.0, 17.0),
        Block(COMMUNICATION, 17.0, 17.25),
    )
    held = (100, 200, 300, 400, 300, 200, 100, 0)
    first, second = recorder.steps
    for step, iteration, offset in ((first, 5, 0.0), (second, 6, 1016.75)):
        assert (step.iteration, step.offset, step.total) == (iteration, offset, 17.25)
        assert step.passes == passes
        assert step.blocks == blocks
        assert step.memory == tuple((each.end, size) for each, size in zip(passes, held, strict=True))


@pytest.mark.parametrize("leave", [lambda recorder: recorder.end_step(1), lambda recorder: recorder.abandon()])
def test_nothing_is_watched_after_a_recording(leave: Callable[[ScheduleRecorder], None], clock: Clock) -> None:
    before = Group.send, Group.allreduce, Work.wait
    recorder = ScheduleRecorder(clock, None, [])  # pyright: ignore[reportArgumentType]
    recorder.begin_step()
    assert Group.send is not before[0]
    leave(recorder)
    assert (Group.send, Group.allreduce, Work.wait) == before


def test_the_engines_other_timers_are_called_as_before(clock: Clock) -> None:
    told: list[Any] = []

    def others(name: str, log_level: int | None = None) -> Any:
        told.append((name, log_level))
        return SimpleNamespace(
            start=lambda barrier: told.append(("start", barrier)), stop=lambda barrier: told.append(("stop", barrier))
        )

    recorder = ScheduleRecorder(clock, None, [])  # pyright: ignore[reportArgumentType]
    timers = recorder.timers(others)
    for name in ("forward-compute", "optimizer"):
        timers(name, log_level=2).start(barrier=True)
        timers(name).stop(barrier=True)
        assert told == [(name, 2), ("start", True), (name, None), ("stop", True)]
        told.clear()
    assert len(recorder._passes) == 1
