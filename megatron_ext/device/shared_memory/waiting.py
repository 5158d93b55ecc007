"""A wait for other ranks' writes, which sees that one of them has ended, and the group's timeout.

The errors say what gloo says of a connection that broke or stayed silent, so that they are taken for the same
(`resilience/process_end.py`).
"""

import time
from collections.abc import Callable, Collection
from datetime import timedelta

from megatron_ext.device.shared_memory import futex, peers
from megatron_ext.device.shared_memory.meeting import Members
from megatron_ext.device.shared_memory.segment import Segment

_UNREMARKABLE = 0.04  # seconds
_A_PAUSE = 3.0  # seconds that a sleep of 0.05 takes only where the whole job was suspended


def sleep_until(
    segment: Segment,
    word: int,
    number: int,
    absent: Callable[[], Collection[int]],
    members: Members,
    timeout: Callable[[], timedelta],
    what: str,
) -> None:
    """Return when the word has reached `number`.

    Args:
        absent: returns the group's ranks that have not come yet.
        timeout: returns how long to wait; asked for when it takes long.
        what: the operation, for errors.
    Raises:
        RuntimeError: an absent rank's process has ended, or the timeout has passed.
    """
    words, address = segment.words, segment.address + 8 * word
    began = slept = time.monotonic()
    while (value := words[word]) < number:
        futex.sleep(address, value)
        before, slept = slept, time.monotonic()
        if slept - before > _A_PAUSE:
            began += slept - before
        waited = slept - began
        if waited > _UNREMARKABLE and words[word] < number:
            late = absent()
            if not late:
                break  # who came last ended before it could say so
            _refuse_lost(late, absent, members, what)
            limit = timeout()
            if waited > limit.total_seconds():
                raise RuntimeError(
                    f"Timed out waiting {limit // timedelta(milliseconds=1)}ms in {what} through shared memory: "
                    f"{_names(late, members)} did not come"
                )
    futex.fence()


def _refuse_lost(late: Collection[int], absent: Callable[[], Collection[int]], members: Members, what: str) -> None:
    ended = [rank for rank in late if peers.has_ended(members.processes[rank])]
    lost = set(ended) & set(absent()) if ended else set()  # it may have come just before it ended
    if lost:
        raise RuntimeError(
            f"Connection closed by peer: {_names(lost, members)} ended before {what} through shared memory"
        )


def _names(ranks: Collection[int], members: Members) -> str:
    return ", ".join(f"rank {members.names[rank]} (process {members.processes[rank]})" for rank in sorted(ranks))
