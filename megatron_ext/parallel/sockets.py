"""Ranks of one machine talk over its loopback interface, so that nothing of a run listens to the network.

By default torch's store listens on every interface, and gloo and NCCL on the one that the machine's name leads to. Who
reaches these can end a run, or change it: none of the three asks who is there.
"""

import errno
import ipaddress
import os
import socket
import threading
from collections.abc import MutableMapping
from datetime import timedelta

from torch.distributed import Store, TCPStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.errors import ConfigurationError, PeerLostError

LOOPBACK = "127.0.0.1"
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TO_REPORT = 1.0  # seconds in which torch says itself that the time is over


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


def open_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store that the launcher's variables name, this rank, and the number of ranks.

    Where rank 0 is to host it and all ranks are on this machine, it listens on the loopback interface alone.

    Raises:
        ConfigurationError: a variable is missing, or rank 0's port is another program's.
        PeerLostError: nobody answers there within `timeout`, or who answers is no store.
    """
    missing = [name for name in _OF_A_LAUNCH if not os.environ.get(name)]
    if missing:
        raise ConfigurationError(
            [
                f"${name} is not set, but $RANK is: start ranks with torchrun, which sets it, or unset RANK to run one "
                "process"
                for name in missing
            ]
        )
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return _opened_within(timeout)
    except (OSError, RuntimeError) as error:  # torch's are RuntimeErrors
        if getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error):
            raise ConfigurationError(
                f"$MASTER_PORT is {os.environ['MASTER_PORT']}, which another program uses on this machine; choose "
                "another port (torchrun --master-port), or end that program"
            ) from error
        seen = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        if "waiting for clients" in seen:  # by rank 0
            raise PeerLostError(
                f"not all ranks came to the start of the run ({seen}). Look at what they wrote, and whether their "
                f"machines reach {place}; a slow start needs a larger --distributed-timeout-minutes."
            ) from error
        raise PeerLostError(
            f"rank 0 did not come to the start of the run: no store at {place}, which $MASTER_ADDR and $MASTER_PORT "
            f"name ({seen}). Look at what rank 0 wrote, and whether this machine reaches it there; a slow start needs "
            "a larger --distributed-timeout-minutes."
        ) from error


def _opened_within(timeout: timedelta) -> tuple[Store, int, int]:
    """Return `_opened`; by itself, torch waits without end for the first word of one that listens and says nothing."""
    found: list[tuple[Store, int, int]] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(_opened(timeout))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="open the store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _TO_REPORT)
    for error in failed:
        raise error
    if not found:
        raise RuntimeError("who listens there says nothing")
    return found[0]


def _opened(timeout: timedelta) -> tuple[Store, int, int]:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not is_one_machine():
        return next(rendezvous("env://", timeout=timeout))
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank != 0:
        return TCPStore(LOOPBACK, port, size, is_master=False, timeout=timeout), rank, size
    listening = socket.create_server((LOOPBACK, port))
    store = TCPStore(
        LOOPBACK,
        listening.getsockname()[1],
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )
    return store, rank, size


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
