"""What a step's time counts as, by a clock of the test's: which group, which operation, which step."""

from typing import Any

import pytest
import torch

from megatron_ext.parallel.operations import COLLECTIVES, END_OF_BATCH, MESSAGES
from megatron_ext.plugins.rank_times import communication_clock
from megatron_ext.plugins.rank_times.communication_clock import CommunicationClock, ComputeTime, shares


class Device:
    """A clock that moves when it is told. What is later than `passed` the device has not done yet."""

    now, passed = 0.0, 1e9

    def mark(self) -> float:
        return self.now

    def has_passed(self, mark: float) -> bool:
        return mark <= self.passed

    def seconds_between(self, first: float, last: float) -> float:
        return last - first

    def seconds_without_processor(self) -> float:
        return 0.0

    seconds_of_a_fixed_loop = seconds_without_processor


class Work:
    device: Device

    def wait(self) -> str:
        self.device.now += 0.5
        return "waited"


def takes_a_second(group: Any) -> Work | None:
    group.device.now += 1.0
    return None if group.group_name == "without work" else Work()


class Group:
    device: Device

    def __init__(self, name: str):
        self.group_name = name


for _name in (*MESSAGES, *COLLECTIVES, END_OF_BATCH):
    setattr(Group, _name, takes_a_second)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    for kind, name in ((Group, "ProcessGroup"), (Work, "Work")):
        monkeypatch.setattr(kind, "device", found, raising=False)
        monkeypatch.setattr(communication_clock, name, kind)
    return found


def clock_of(device: Device, pipeline: str | None = "stages") -> CommunicationClock:
    group: Any = None if pipeline is None else Group(pipeline)
    given: Any = device
    return CommunicationClock(given, group)


def call(group: str, name: str) -> Any:
    return getattr(Group(group), name)()


@pytest.mark.parametrize("name", [*MESSAGES, *COLLECTIVES])
@pytest.mark.parametrize("pipeline", ["stages", None])
def test_only_messages_between_stages_are_idle_time(name: str, pipeline: str | None, device: Device) -> None:
    """The ring of context parallelism sends messages too, in a group of its own."""
    clock = clock_of(device, pipeline)
    clock.start()
    seconds = []
    for group in ("stages", "context", "without work"):
        clock.begin_step()
        work = call(group, name)
        assert work is None or work.wait() == "waited"
        device.now += 2.0
        clock.end_step()
        seconds.append(clock.take().tolist())
    clock.stop()
    of_stages = [0.0, 1.5, 3.5] if name in MESSAGES and pipeline else [1.5, 0.0, 3.5]
    assert seconds == [of_stages, [1.5, 0.0, 3.5], [1.0, 0.0, 3.0]]


@pytest.mark.parametrize(
    ("batch", "seconds"),
    [
        ([("stages", "send"), ("stages", "recv")], [0.0, 3.5, 3.5]),
        ([("context", "send"), ("context", "recv")], [3.5, 0.0, 3.5]),
        ([("stages", "allreduce")], [2.5, 0.0, 2.5]),
        ([("stages", "send"), ("stages", "allgather")], [2.5, 1.0, 3.5]),
        ([], [1.5, 0.0, 1.5]),
    ],
)
def test_a_batch_is_of_the_kind_of_what_it_starts(
    batch: list[tuple[str, str]], seconds: list[float], device: Device
) -> None:
    """Each call takes 1 s, and the wait for the batch 0.5 s."""
    clock = clock_of(device)
    clock.start()
    clock.begin_step()
    for group, name in batch:
        call(group, name)
    call("stages", END_OF_BATCH).wait()
    clock.end_step()
    clock.stop()
    assert clock.take().tolist() == seconds


def test_a_wait_for_what_nobody_saw_begin_is_communication(device: Device) -> None:
    clock = clock_of(device)
    clock.start()
    clock.begin_step()
    Work().wait()
    clock.end_step()
    clock.stop()
    assert clock.take().tolist() == [0.5, 0.0, 0.5]
    assert call("stages", "send").wait() == "waited"
    assert clock.take().tolist() == [0.0, 0.0, 0.0], "the methods are the plain ones again"


def test_what_lies_between_steps_counts_nowhere(device: Device) -> None:
    clock = clock_of(device)
    clock.start()
    call("data", "allreduce").wait()
    clock.begin_step()
    device.now += 1.0
    clock.end_step()
    call("data", "allreduce").wait()
    clock.stop()
    assert clock.take().tolist() == [0.0, 0.0, 1.0]


def test_steps_are_told_once_and_when_the_device_has_passed_them(device: Device) -> None:
    clock = clock_of(device)
    clock.start()
    for seconds in (1.0, 2.0, 4.0):
        clock.begin_step()
        call("data", "allreduce")
        call("stages", "send")
        device.now += seconds
        clock.end_step()
    clock.stop()
    device.passed = 7.0  # the end of the second step; they end after 3, 7 and 13 seconds
    assert clock.take().tolist() == [2.0, 2.0, 7.0]
    assert clock.take().tolist() == [0.0, 0.0, 0.0]
    device.passed = 13.0
    assert clock.take_compute() == [ComputeTime(each, each, 0.0) for each in (1.0, 2.0, 4.0)]
    assert clock.take_compute() == []
    assert clock.take().tolist() == [1.0, 1.0, 6.0]


def test_the_last_64_steps_are_kept(device: Device) -> None:
    clock = clock_of(device)
    for number in range(70):
        clock.begin_step()
        device.now += number
        clock.end_step()
    assert [found.seconds for found in clock.take_compute()] == [float(number) for number in range(6, 70)]


def test_shares_are_of_the_whole() -> None:
    found = shares(torch.tensor([2.0, 1.0, 8.0], dtype=torch.float64))
    assert found == {"compute": 0.625, "communication": 0.25, "idle": 0.125}
    assert shares(torch.zeros(3)) is None
