"""Messages and collectives of real ranks as they issued them, replayed as NCCL would run them on GPUs.

A rank's operations of one communicator run one after the other on one stream. An operation begins when the one before
it on its stream has ended and when what was computed before it was issued has been; it ends when the other ranks that
take part have begun it, too. (NCCL keeps small messages in a buffer, and does not wait then: that only helps.) What is
computed after a wait begins when the operation has ended. A batch of messages is one operation.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import p2p_communication
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup, Work  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.parallel.operations import COLLECTIVES, WrappedMethods


class Event(NamedTuple):
    """What a rank's Python did with the process groups: issued an operation, or waited for one."""

    kind: str
    """"send", "recv", "all" (a collective) or "wait"."""
    operation: int
    """Number of the operation on this rank; messages of one batch have one number."""
    group: str = ""
    members: tuple[int, ...] = ()
    peer: int = -1
    """Global rank of the other end of a message."""


class Recorder:
    """Records this rank's events in order.

    Args:
        batches: whether the messages of one call of megatron-core's pipeline are one operation, as on GPUs without
            interleaving.
    """

    def __init__(self, batches: bool):
        self.events: list[Event] = []
        self._batches, self._in_batch, self._number = batches, False, 0
        self._works: dict[int, tuple[Work, int]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context in which this process's operations are recorded."""
        methods, plain = WrappedMethods(), p2p_communication._p2p_ops
        for name in ("send", "recv"):
            methods.wrap(ProcessGroup, name, lambda original, name=name: self._issued(name, original))
        for name in COLLECTIVES:
            methods.wrap(ProcessGroup, name, lambda original: self._issued("all", original))
        for kind in (Work, FakeWork):  # the second is what a rank that is played gets, and has a method of its own
            methods.wrap(kind, "wait", self._waited)
            # A GPU may not have got so far yet: what is left out for a message that has ended is waited for.
            methods.wrap(kind, "is_completed", lambda _original: lambda _work: False)

        def exchange(**options: Any) -> Any:
            self._in_batch = self._batches
            self._number += self._batches
            try:
                return plain(**options)
            finally:
                self._in_batch = False

        p2p_communication._p2p_ops = exchange
        try:
            yield
        finally:
            p2p_communication._p2p_ops = plain
            methods.put_back()

    def _issued(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            self._number += not self._in_batch
            number, members = self._number, tuple(torch.distributed.get_process_group_ranks(group))
            peer = members[arguments[1]] if kind != "all" else -1
            self.events.append(Event(kind, number, group.group_name, members, peer))
            work = original(group, *arguments, **options)
            if work is not None:
                self._works[id(work)] = work, number  # kept, so that no other work gets its id
            return work

        return operation

    def _waited(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Work, *arguments: Any, **options: Any) -> Any:
            if id(work) in self._works:
                self.events.append(Event("wait", self._works[id(work)][1]))
            return original(work, *arguments, **options)

        return wait


@dataclass
class _Operation:
    """An operation of one rank, and where it stands."""

    rank: int
    parts: list[Event]
    position: int
    """Number of this rank's waits before it was issued."""
    has_begun: bool = False
    has_ended: bool = False


def unfinished(by_rank: Sequence[Sequence[Event]], *, pairs_apart: bool) -> list[tuple[int, Event]]:
    """Return the operations that never end, each with its rank; none where the ranks finish.

    Args:
        by_rank: what each rank did.
        pairs_apart: whether messages that are not batched run on a stream for each pair of ranks, as those of
            nccl-legacy, and not on their group's.
    """
    operations: list[dict[int, _Operation]] = []
    streams: list[dict[tuple[Any, ...], list[_Operation]]] = []
    waits: list[list[int]] = []
    for rank, events in enumerate(by_rank):
        sizes = Counter(event.operation for event in events if event.kind != "wait")
        own, queues, waited = {}, {}, []
        for event in events:
            if event.kind == "wait":
                waited.append(event.operation)
                continue
            if event.operation not in own:
                own[event.operation] = _Operation(rank, [], len(waited))
                alone = pairs_apart and event.kind != "all" and sizes[event.operation] == 1
                pair = (min(rank, event.peer), max(rank, event.peer)) if alone else ()
                queues.setdefault((event.group, *pair), []).append(own[event.operation])
            own[event.operation].parts.append(event)
        operations.append(own)
        streams.append(queues)
        waits.append(waited)
    _run(operations, streams, waits, _partners(operations))
    return [(one.rank, one.parts[0]) for own in operations for one in own.values() if not one.has_ended]


def _partners(operations: Sequence[dict[int, _Operation]]) -> dict[int, list[_Operation]]:
    """Return who takes part with each operation, by its id(): the n-th message from one rank to another in a group is
    the n-th that this one receives there, and the n-th collective of a group is its n-th on each of its ranks."""
    found: dict[tuple[Any, ...], list[_Operation]] = {}
    for rank, own in enumerate(operations):
        counts = Counter[tuple[Any, ...]]()
        for operation in own.values():
            for event in operation.parts:
                ends = (event.members,) if event.kind == "all" else (rank, event.peer)
                key = (event.group, *(ends[::-1] if event.kind == "recv" else ends))
                counts[key] += 1
                found.setdefault((*key, counts[key]), []).append(operation)
    partners: dict[int, list[_Operation]] = {}
    for key, together in found.items():
        expected = len(key[1]) if isinstance(key[1], tuple) else 2
        for operation in together:
            partners.setdefault(id(operation), []).extend(together)
            # One whose other end was never issued waits for ever: an operation that cannot begin stands for it.
            if len(together) < expected:
                partners[id(operation)].append(_Operation(-1, operation.parts, 0))
    return partners


def _run(operations: Any, streams: Any, waits: Sequence[list[int]], partners: dict[int, list[_Operation]]) -> None:
    computed = [0] * len(operations)  # waits that each rank's computation has passed
    moves = True
    while moves:
        moves = False
        for rank, queues in enumerate(streams):
            while computed[rank] < len(waits[rank]) and operations[rank][waits[rank][computed[rank]]].has_ended:
                computed[rank] += 1
                moves = True
            for queue in queues.values():
                if queue and queue[0].has_ended:
                    queue.pop(0)
                    moves = True
                if queue and not queue[0].has_begun and computed[rank] >= queue[0].position:
                    queue[0].has_begun = moves = True
                if queue and queue[0].has_begun and all(other.has_begun for other in partners[id(queue[0])]):
                    moves = moves or not queue[0].has_ended
                    queue[0].has_ended = True
