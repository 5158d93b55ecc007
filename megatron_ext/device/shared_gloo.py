"""Lets all groups of gloo in a process wait for messages on one thread.

torch gives each group a gloo device of its own, whose thread wakes up a hundred times a second. megatron-core makes
some twenty groups, most of them of one rank: 3% of a core for every rank that waits, and a sum over ranks took half as
much CPU time again (docs/decisions.md). gloo means a device to be shared by many groups.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroupGloo


def create_on_one_device(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that makes groups as `original` does, torch's own, all of them on the first one's devices.

    The first group finds them as ever: GLOO_SOCKET_IFNAME, or the address of the machine's name.
    """
    devices: list[Any] = []

    @functools.wraps(original)
    def create(made_of: Any, backend_options: Any) -> Any:
        if not devices or made_of.enable_reconfigure:
            group = original(made_of, backend_options)
            devices[:] = devices or group.options._devices
            return group
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices, options._threads, options._timeout = devices, 2 * len(devices), made_of.timeout
        group = ProcessGroupGloo(made_of.store, made_of.group_rank, made_of.group_size, options)
        group.options.global_ranks_in_group = made_of.global_ranks_in_group
        group.options.group_name = made_of.group_id
        return group

    return create
