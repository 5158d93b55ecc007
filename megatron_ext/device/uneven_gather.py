"""Gathers messages of different sizes, which every rank knows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup


def gather_uneven(
    message: torch.Tensor, sizes: Sequence[int], group: ProcessGroup
) -> tuple[list[Any], list[torch.Tensor]]:
    """Begin to gather the messages of all ranks of a group, of one dimension. Collective.

    NCCL takes messages of different sizes in one call. gloo does not, and sends each to all others.

    Args:
        message: this rank's, which must stay as it is until it was sent.
        sizes: elements of each rank's message.

    Returns:
        Handles to wait for, and the messages in the order of the ranks, complete after that.
    """
    messages = [message.new_empty(size) for size in sizes]
    if message.device.type == "cuda":
        return [torch.distributed.all_gather(messages, message, group=group, async_op=True)], messages
    messages[group.rank()] = message
    works = [
        torch.distributed.broadcast(one, group=group, group_src=rank, async_op=True)
        for rank, one in enumerate(messages)
        if len(one)
    ]
    return works, messages
