"""Where a rank is: its phase, what it waits in, how many operations of each group it has begun.

The training writes here, and the watch (`watchdog.py`) reads from its thread. A write is one assignment: no lock, no
system call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple

LOADER = "data loader"
FORWARD_BACKWARD, UPDATE, EVALUATION = "forward and backward", "the update", "the evaluation"
# Phases in which the host waits for nothing but the device, whose collectives it has begun.
FOLLOWS_DEVICE = (FORWARD_BACKWARD, UPDATE, EVALUATION)


class Wait(NamedTuple):
    """Describes what a thread waits in."""

    operation: str
    """Name of the collective, or `LOADER`."""

    group: Any
    """torch's process group; None for the loader."""

    number: int
    """How many collectives of the group this rank had begun, with this one."""

    began: float
    """time.monotonic() at the begin."""


@dataclass
class Progress:
    """Tells how far one rank is."""

    phase: str = "the start"
    waits: dict[int, Wait] = field(default_factory=dict)
    """What each thread waits in, by its id."""

    failed: Wait | None = None
    """The collective whose failure was the last one."""

    issued: Wait | None = None
    """The last collective that was handed to the device, which goes on by itself."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of collectives begun, by torch's name of the group."""

    def longest(self) -> Wait | None:
        """Return the wait that began first; None where no thread waits."""
        return min(list(self.waits.values()), key=lambda wait: wait.began, default=None)

    def begin_batch(self, phase: str) -> None:
        """Mark that the work on a global batch begins, which may be long and begins no collective for a while."""
        self.issued = None
        self.phase = phase

    def begin_microbatch(self) -> None:
        """Mark that the host begins a microbatch. It is ahead of the device by few, so that the device goes on."""
        if self.issued is not None:
            self.issued = self.issued._replace(began=monotonic())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark that the thread waits for its data loader."""
        thread = get_ident()
        self.waits[thread] = Wait(LOADER, None, 0, monotonic())
        try:
            yield
        finally:
            self.waits.pop(thread, None)
