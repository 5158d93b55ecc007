"""The last operations through shared memory, in the form in which torch's flight recorder notes gloo's.

torch records what passes its backends. At a hang both are needed: `with_shared_memory` adds these to a dump.
"""

import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

_KEPT = int(os.environ.get("TORCH_FR_BUFFER_SIZE") or 2000)


class Entry:
    """One operation. It holds no tensor."""

    __slots__ = ("has_ended", "is_message", "name", "number", "record", "shapes", "time")

    def __init__(self, record: "Record", name: str, number: int, given: Sequence[torch.Tensor], is_message: bool):
        self.record, self.is_message, self.time = record, is_message, time.time_ns()
        self.name, self.number, self.has_ended = name, number, False
        self.shapes = [(tensor.dtype, tensor.shape) for tensor in given]


_entries: deque[Entry] = deque(maxlen=max(1, _KEPT))


class Record:
    """Notes a group's operations.

    Args:
        group: torch's; its description is set later.
        name: torch's name of it.
    """

    def __init__(self, group: Any, name: str):
        self._group = weakref.ref(group)
        self._name = name

    @property
    def title(self) -> tuple[str, str]:
        """Return name and purpose. Operations count apart from gloo's of the group, so that its name is another."""
        group = self._group()
        return f"{self._name} through shared memory", "undefined" if group is None else group.group_desc

    def begin(self, name: str, number: int, given: Sequence[torch.Tensor], *, is_message: bool = False) -> Entry:
        """Note an operation, whose end is to be noted in the entry that this returns.

        Args:
            name: torch's, as its flight recorder has it.
            number: of the operation among those of this group.
            given: what this rank gives, or the room for what it receives.
            is_message: whether it goes from one rank to one other.
        """
        entry = Entry(self, name, number, given, is_message)
        _entries.append(entry)
        return entry


def with_shared_memory(dump: bytes) -> bytes:
    """Return a flight recorder's pickle with the operations through shared memory, in the order of time."""
    if not _entries:
        return dump
    content = pickle.loads(dump)  # torch's own of this process, made a moment ago
    entries = [*content.get("entries", []), *(_as_torch_has_it(entry) for entry in _entries.copy())]
    content["entries"] = sorted(entries, key=lambda entry: entry["time_created_ns"])
    return pickle.dumps(content)


def _as_torch_has_it(entry: Entry) -> dict[str, Any]:
    shapes = [list(shape) for _, shape in entry.shapes]
    types = [str(dtype).removeprefix("torch.").capitalize() for dtype, _ in entry.shapes]
    return {
        "process_group": entry.record.title,
        "profiling_name": f"shared memory:{entry.name}",
        "collective_seq_id": entry.number,
        "p2p_seq_id": entry.number,
        "op_id": entry.number,
        "is_p2p": entry.is_message,
        "input_sizes": shapes,
        "input_dtypes": types,
        "output_sizes": shapes,
        "output_dtypes": types,
        "time_created_ns": entry.time,
        "state": "completed" if entry.has_ended else "scheduled",
        "retired": entry.has_ended,
    }
