"""Copies in a stream of their own: what is launched before comes before them, and an update that was held after them.

Stand-ins for CUDA's streams and events record who waits for whom; the order follows from that alone.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.snapshot import HostGroups, HostMemory
from megatron_ext.device.cpu import CopiesAtOnce
from megatron_ext.device.cuda import CopiesAside, CudaDevice


class Streams:
    """Holds what was launched, and what each launch comes after: all before it in its stream, and what that waited
    for."""

    def __init__(self) -> None:
        self.after: dict[str, frozenset[str]] = {}
        self.current = self.main = Stream(self)

    def launch(self, name: str) -> None:
        self.after[name] = self.current.reached
        self.current.reached |= {name}


class Stream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.reached: frozenset[str] = frozenset()
        """What is done when all of this stream is."""

    def wait_stream(self, other: "Stream") -> None:
        self.reached |= other.reached

    def wait_event(self, event: "Event") -> None:
        self.reached |= event.reached

    def __enter__(self) -> None:
        self._before, self._streams.current = self._streams.current, self

    def __exit__(self, *_error: object) -> None:
        self._streams.current = self._before


class Event:
    """Stands for torch.cuda.Event."""

    reached: frozenset[str] = frozenset()
    waited = False

    def record(self, stream: Stream) -> None:
        self.reached = stream.reached

    def synchronize(self) -> None:
        self.waited = True


class OnGpu:
    """Stands for a tensor on a GPU, or the host memory for it, whose copy is a launch."""

    device, shape, dtype = torch.device("cuda", 0), torch.Size([2]), torch.float32

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.used_by: list[Stream] = []

    def copy_(self, _tensor: Any, non_blocking: bool) -> None:
        assert non_blocking, "the thread would wait"
        self.streams.launch("copy")

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(made))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return made


def test_an_update_that_is_held_comes_after_the_copies(streams: Streams) -> None:
    streams.launch("update of before")
    copies, tensor, memory = CopiesAside(), OnGpu(streams), OnGpu(streams)
    streams.launch("what makes the tensor")
    copies.copy(memory, tensor)  # pyright: ignore[reportArgumentType]
    assert streams.current is streams.main
    assert streams.after["copy"] == {"update of before", "what makes the tensor"}
    assert [used is not streams.main for used in tensor.used_by] == [True], "else its memory could be another's"
    streams.launch("forward pass")
    assert "copy" not in streams.after["forward pass"], "the training goes on"
    copies.hold()
    streams.launch("update")
    assert {"copy", "forward pass"} <= streams.after["update"]


def test_who_reads_the_copies_waits_for_them(streams: Streams) -> None:
    copies = CopiesAside()
    copies.copy(OnGpu(streams), OnGpu(streams))  # pyright: ignore[reportArgumentType]
    assert not copies._done.waited  # pyright: ignore[reportAttributeAccessIssue]
    copies.wait()
    assert copies._done.waited  # pyright: ignore[reportAttributeAccessIssue]


def test_memory_for_a_gpu_is_pinned(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into other memory is not launched: the host waits for it."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda *_shape, **how: asked.append(how) or OnGpu(streams))
    HostMemory().copy(CopiesAside(), "a", OnGpu(streams))  # pyright: ignore[reportArgumentType]
    assert [(how["device"], how["pin_memory"]) for how in asked] == [("cpu", True)]
    assert "copy" in streams.after


def test_numbers_that_are_read_later_are_copied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 and into pinned memory: else the host would wait for the copy."""
    asked: list[tuple[Any, ...]] = []
    genuine = torch.empty

    def empty(shape: Any, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append((tuple(shape), dtype, pin_memory))
        return genuine(shape, dtype=dtype)

    heard: list[str] = []
    event = SimpleNamespace(record=lambda: heard.append("recorded"), synchronize=lambda: heard.append("waited"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    numbers = torch.tensor([1.0 + 2.0**-40, 2.0], dtype=torch.float64)
    read = object.__new__(CudaDevice).read_later(numbers)
    assert heard == ["recorded"]
    numbers.zero_()
    assert read() == [1.0 + 2.0**-40, 2.0]
    assert heard == ["recorded", "waited"]
    assert asked == [((2,), torch.float64, True)]


def test_one_save_after_the_other_uses_the_same_memory() -> None:
    """Unless a tensor has another shape or type by then."""
    memory, copies = HostMemory(), CopiesAtOnce()
    first = memory.copy(copies, "a", torch.tensor([1.0, 2.0]))
    again = memory.copy(copies, "a", torch.tensor([3.0, 4.0]))
    assert again is first
    assert (first.tolist(), memory.bytes) == ([3.0, 4.0], 8)
    assert memory.copy(copies, "b", torch.tensor([5.0])) is not first
    shorter = memory.copy(copies, "a", torch.tensor([6.0]))
    assert (shorter.tolist(), memory.bytes) == ([6.0], 8)
    other = memory.copy(copies, "a", torch.tensor([7], dtype=torch.int64))
    assert (other.tolist(), other.dtype, memory.bytes) == ([7], torch.int64, 12)


def test_host_memory_moves_over_gloo_in_a_group_of_the_same_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: {"group": [1, 3]}[group])
    monkeypatch.setattr(
        torch.distributed, "new_group", lambda ranks, **named: made.append((ranks, named)) or f"new {len(made)}"
    )
    groups, group = HostGroups(), "group"
    assert [groups.of(group) for _ in range(2)] == ["new 1"] * 2  # pyright: ignore[reportArgumentType]
    assert made == [([1, 3], {"backend": "gloo", "use_local_synchronization": True})]
