"""Keeps the traffic of ranks that are all on one machine on its loopback interface, so that nothing of a run listens to
the network.

By default torch's store listens on every interface, and gloo and NCCL on the interface of the machine's name. A program
that reaches these can end a run, or change it: none of the three authenticates who connects.
"""

import ipaddress
import os
import socket
from collections.abc import MutableMapping

LOOPBACK = "127.0.0.1"


_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def is_one_machine(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether all ranks are on this machine: by torchrun's count of them, else by the address of rank 0."""
    local, world = environment.get("LOCAL_WORLD_SIZE"), environment.get("WORLD_SIZE")
    if local is not None and world is not None:
        return local == world
    # A Kubernetes operator may tell the first rank localhost, and the others its name.
    return _is_loopback(environment.get("MASTER_ADDR", "")) and "KUBERNETES_SERVICE_HOST" not in environment


def keep_to_this_machine(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo and NCCL use the loopback interface, if all ranks are here and the user has named no other."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not names or not is_one_machine(environment):
        return
    for variable in _VARIABLES:
        environment.setdefault(variable, names[0])


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
