"""Stands in the place of the methods of torch's process groups, and decides between shared memory and gloo.

`join` is called when gloo has made a group. Each function here takes torch's method and returns what replaces it; the
rows of `adaptation.py` put them in place. What goes through shared memory does not pass torch's dispatcher, so that a
dispatch mode does not see it. Everything that is not taken below is gloo's, and what torch calls from C++, too.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from megatron_ext.device.shared_memory import collectives
from megatron_ext.device.shared_memory.any_source import MessageFromAnyone
from megatron_ext.device.shared_memory.channel import Channel
from megatron_ext.device.shared_memory.mailbox import Incoming, Outgoing
from megatron_ext.device.shared_memory.meeting import meet
from megatron_ext.device.shared_memory.record import Record
from megatron_ext.device.shared_memory.ring_order import COMBINE, DTYPES, MEAN
from megatron_ext.device.shared_memory.segment import LARGEST
from megatron_ext.device.shared_memory.work import SharedWork

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ALL_REDUCES = (AllreduceOptions, AllreduceCoalescedOptions)  # the second was one of the first in older torch


class _Ends:
    """This rank's ends of a group's channels."""

    def __init__(self, channel: Channel, record: Record):
        self.channel = channel
        others = [rank for rank in range(channel.ranks) if rank != channel.rank]
        self.outgoing = {rank: Outgoing(channel, rank, record) for rank in others}
        self.incoming = {rank: Incoming(channel, rank, record) for rank in others}


class _Alone(SharedWork):
    """An operation of a group of one rank, which has ended when it is begun."""

    def __init__(self, name: str, output: torch.Tensor, given: torch.Tensor):
        super().__init__(name, [output], [given])
        if output.data_ptr() != given.data_ptr():
            output.copy_(given.view(output.shape))
        self.end()


_by_group: dict[int, _Ends] = {}
_of_one_rank: set[int] = set()
"""Groups whose operations are done by copying, or by nothing at all: gloo hands them to its threads all the same."""
_left_to_gloo = 0


@contextlib.contextmanager
def left_to_gloo() -> Iterator[None]:
    """Leave everything to gloo, for what counts at torch's dispatcher. All ranks must do so alike."""
    global _left_to_gloo
    _left_to_gloo += 1
    try:
        yield
    finally:
        _left_to_gloo -= 1


def join(made_of: Any, backend: Any) -> None:
    """Give a new group of gloo a shared memory, if its ranks are on one machine. Collective.

    Args:
        made_of: what torch makes the group of.
        backend: gloo's part of it, whose timeout holds here, too.
    """
    group = made_of.process_group
    if group is None:
        return
    if made_of.group_size == 1:
        _of_one_rank.add(id(group))
        weakref.finalize(group, _of_one_rank.discard, id(group)).atexit = False
        return
    met = meet(made_of.store, made_of.group_rank, made_of.group_size, list(made_of.global_ranks_in_group))
    if met is None:
        return
    options = backend.options
    record = Record(group, made_of.group_id)
    key = id(group)
    _by_group[key] = _Ends(Channel(*met, lambda: options._timeout, record), record)
    weakref.finalize(group, _by_group.pop, key, None).atexit = False


def _ends(group: Any, *tensors: torch.Tensor) -> _Ends | None:
    """Return the ends of a group through which these tensors go; None where they are gloo's.

    Args:
        tensors: what this rank gives, and what it gets, if that is another one.
    """
    ends = _by_group.get(id(group))
    if ends is None or _left_to_gloo or not _are_plain(tensors):
        return None
    return ends if 0 < tensors[0].nbytes <= LARGEST else None  # a sparse tensor does not know its bytes


def _is_alone(group: Any, *tensors: torch.Tensor) -> bool:
    """Return whether these tensors are those of an operation of one rank, which has as many numbers as it gives."""
    sizes = {tensor.numel() for tensor in tensors}
    return id(group) in _of_one_rank and not _left_to_gloo and len(sizes) == 1 and _are_plain(tensors)


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype is not tensors[0].dtype or tensor.is_sparse:
            return False
    return True


def _operation(options: Any, tensor: torch.Tensor) -> int | None:
    """Return the number of a reduction that ring_order.py does as gloo does; None for any other."""
    operation = options.reduceOp
    number = int(getattr(operation, "op", operation))
    if number not in COMBINE or tensor.dtype not in DTYPES or (number == MEAN and not tensor.dtype.is_floating_point):
        return None
    return number


def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.allreduce, and allreduce_coalesced, where megatron-core's gradients pass, each by itself."""

    @functools.wraps(original)
    def allreduce(group: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and isinstance(args[1], _ALL_REDUCES) and len(args[0]) == 1:
            [tensor] = args[0]
            if _is_alone(group, tensor) and _operation(args[1], tensor) is not None:
                return _Alone("allreduce", tensor, tensor)
            ends = _ends(group, tensor)
            # Every rank reads what all have written; of larger tensors, gloo's ring adds up each part once.
            if (
                ends is not None
                and tensor.nbytes * ends.channel.ranks <= LARGEST
                and (operation := _operation(args[1], tensor)) is not None
            ):
                work = collectives.AllReduce(ends.channel, tensor, operation)
                return ends.channel.issue(work, tensor.nbytes)
        return original(group, *args, **kwargs)

    return allreduce


def reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.reduce_scatter_single, and its older name."""

    @functools.wraps(original)
    def reduce_scatter_single(group: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and type(args[2]) is ReduceScatterOptions:
            output, given, options = args
            if _is_alone(group, output, given) and _operation(options, given) is not None:
                return _Alone("reduce_scatter", output, given)
            ends = _ends(group, given, output)
            if (
                ends is not None
                and output.numel() * ends.channel.ranks == given.numel()
                and (operation := _operation(options, given)) is not None
            ):
                work = collectives.ReduceScatter(ends.channel, output, given, operation)
                return ends.channel.issue(work, given.nbytes)
        return original(group, *args, **kwargs)

    return reduce_scatter_single


def reduce_scatter_coalesced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.reduce_scatter_single_coalesced, and its older name, for one tensor."""
    no_coalescing = reduce_scatter(lambda *_args: None)

    @functools.wraps(original)
    def reduce_scatter_single_coalesced(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = None
        if len(args) == 3 and len(args[0]) == len(args[1]) == 1:
            work = no_coalescing(group, args[0][0], args[1][0], args[2])
        return original(group, *args, **kwargs) if work is None else work

    return reduce_scatter_single_coalesced


def all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.all_gather_single, and its older name."""

    @functools.wraps(original)
    def all_gather_single(group: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and isinstance(args[1], torch.Tensor):
            output, given, _ = args
            if _is_alone(group, output, given):
                return _Alone("all_gather", output, given)
            ends = _ends(group, given, output)
            if ends is not None and output.numel() == given.numel() * ends.channel.ranks:
                work = collectives.AllGather(ends.channel, output, given)
                return ends.channel.issue(work, given.nbytes)
        return original(group, *args, **kwargs)

    return all_gather_single


def all_gather_list(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.allgather."""

    @functools.wraps(original)
    def allgather(group: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and len(args[0]) == len(args[1]) == 1 and isinstance(args[1][0], torch.Tensor):
            [outputs], [given], _ = args
            ends = _ends(group, given, *outputs)
            sizes = {output.numel() for output in outputs}
            if ends is not None and len(outputs) == ends.channel.ranks and sizes == {given.numel()}:
                work = collectives.AllGatherList(ends.channel, outputs, given)
                return ends.channel.issue(work, given.nbytes)
        return original(group, *args, **kwargs)

    return allgather


def all_to_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.all_to_all_single, and its older name, for equal parts."""

    @functools.wraps(original)
    def all_to_all_single(group: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 5 and not len(args[2]) and not len(args[3]):
            output, given = args[:2]
            ends = _ends(group, given, output)
            if ends is not None and output.numel() == given.numel() and not given.size(0) % ends.channel.ranks:
                work = collectives.AllToAll(ends.channel, output, given)
                return ends.channel.issue(work, given.nbytes)
        return original(group, *args, **kwargs)

    return all_to_all_single


def broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.broadcast."""

    @functools.wraps(original)
    def broadcast_(group: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and type(args[1]) is BroadcastOptions and len(args[0]) == 1:
            [tensor] = args[0]
            if _is_alone(group, tensor) and args[1].rootRank == 0:
                return _Alone("broadcast", tensor, tensor)
            ends = _ends(group, tensor)
            if ends is not None:
                work = collectives.Broadcast(ends.channel, tensor, args[1].rootRank)
                return ends.channel.issue(work, tensor.nbytes)
        return original(group, *args, **kwargs)

    return broadcast_


def barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.barrier."""

    @functools.wraps(original)
    def barrier_(group: Any, *args: Any, **kwargs: Any) -> Any:
        ends = _by_group.get(id(group))
        if ends is None or _left_to_gloo:
            return original(group, *args, **kwargs)
        return ends.channel.issue(collectives.Barrier(ends.channel), 0)

    return barrier_


def send(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.send."""

    @functools.wraps(original)
    def send_(group: Any, *args: Any, **kwargs: Any) -> Any:
        box = _mailbox(group, "outgoing", args)
        return original(group, *args, **kwargs) if box is None else box.send(args[0][0])

    return send_


def receive(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.recv."""

    @functools.wraps(original)
    def recv(group: Any, *args: Any, **kwargs: Any) -> Any:
        box = _mailbox(group, "incoming", args)
        return original(group, *args, **kwargs) if box is None else box.receive(args[0][0])

    return recv


def receive_from_anyone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ProcessGroup.recv_anysource: what comes through shared memory is not seen by gloo."""

    @functools.wraps(original)
    def recv_anysource(group: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and args[1] == 0 and len(args[0]) == 1:
            [tensor] = args[0]
            ends = _ends(group, tensor)
            if ends is not None:
                return MessageFromAnyone(ends.incoming.values(), tensor)
        return original(group, *args, **kwargs)

    return recv_anysource


def _mailbox(group: Any, direction: str, args: tuple) -> Any:
    """Return the mailbox for a message; None where it is gloo's: another tag than 0, or too large."""
    if len(args) != 3 or args[2] != 0 or len(args[0]) != 1:
        return None
    ends = _ends(group, args[0][0])
    return None if ends is None else getattr(ends, direction).get(args[1])


def wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Work.wait, which others wrap, too: so that they see the waits here."""

    @functools.wraps(original)
    def wait_(work: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(work, SharedWork):
            return work.complete(*args, **kwargs)
        return original(work, *args, **kwargs)

    return wait_
