"""Lets the ranks of one attempt meet, apart from ranks of earlier attempts.

torchrun starts all ranks again after a failure, and lends every attempt the same store, which torchrun's own process
hosts. The gloo and NCCL addresses that an earlier attempt left in the store belong to dead processes, and a rank that
takes them for a peer's fails with "connection refused" or "Connect timeout", until the restarts are used up. No
variable tells attempts apart on several machines: a torchrun that restarts because another one did raises no count. So
the ranks agree:

1. Rank 0 offers a random token. It replaces the token of an earlier attempt.
2. Every other rank joins the offered token with a random name of its own, and does so again if the token changes.
3. When all have joined, rank 0 publishes their names.

A rank that finds its own name among those published knows that rank 0 lives, belongs to its attempt, and has seen all
others. The token then is the prefix of all keys. A name begins with the number of ranks that its process was told, so
that all see where a launch has told them different ones.

Under other launchers the ranks agree, too, although their store is new: who does not come is named.
"""

import errno
import json
import os
import socket
import threading
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.parallel.loopback import LOOPBACK, is_one_machine

_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TO_REPORT = 1.0  # seconds in which torch says itself that the time is over


def open_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store that the launcher's variables name, this rank, and the number of ranks.

    Where rank 0 is to host it and all ranks are on this machine, it listens on the loopback interface alone.

    Raises:
        ConfigurationError: a variable is missing, or rank 0's port is another program's.
        PeerLostError: nobody answers at that address within `timeout`, or the program that answers is no store.
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
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
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
                f"machines reach {address}; a slow start needs a larger --distributed-timeout-minutes."
            ) from error
        raise PeerLostError(
            f"rank 0 did not come to the start of the run: no store at {address}, which $MASTER_ADDR and $MASTER_PORT "
            f"name ({seen}). Look at what rank 0 wrote, and whether this machine reaches it there; a slow start needs "
            "a larger --distributed-timeout-minutes."
        ) from error


def _opened_within(timeout: timedelta) -> tuple[Store, int, int]:
    """Return `_opened`; by itself, torch waits without end for the first word of one that listens and says nothing."""
    opened: list[tuple[Store, int, int]] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            opened.append(_opened(timeout))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="open the store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _TO_REPORT)
    for error in failed:
        raise error
    if not opened:
        raise RuntimeError("who listens there says nothing")
    return opened[0]


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


_TOKEN = "token"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25  # seconds between two looks at the store


def meet(timeout: timedelta, before: Store | None = None) -> tuple[Store, int, int]:
    """Return the launcher's store with keys of this attempt's own, this rank, and the number of ranks.

    Args:
        timeout: how long they wait for each other.
        before: earlier result of this function in these processes, whose ranks meet again: the store's host still has
            it open.
    Raises:
        PeerLostError: some ranks did not come within `timeout`.
        ConfigurationError: the launcher's variables do not say where the ranks meet, or not the same to all.
    """
    if isinstance(before, PrefixStore):
        store, rank, world_size = before.underlying_store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        store, rank, world_size = open_store(timeout)
    return PrefixStore(f"attempt/{agree(store, rank, world_size, timeout)}", store), rank, world_size


def agree(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a token that this attempt's ranks share with each other and with nobody before them. Collective.

    Raises:
        PeerLostError: some ranks did not come within `timeout`.
        ConfigurationError: they were told different numbers of ranks.
    """
    meeting = PrefixStore("meeting", store)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _offer(meeting, world_size, deadline)
    return _join(meeting, rank, world_size, deadline)


def _offer(store: Store, world_size: int, deadline: float) -> str:
    token = uuid.uuid4().hex
    store.set(_TOKEN, token)
    keys = [_name_key(token, rank) for rank in range(1, world_size)]
    pause = _FIRST_PAUSE
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            absent = [str(rank) for rank, key in enumerate(keys, 1) if not store.check([key])]
            raise PeerLostError(f"{_ranks(absent)} did not come to the start of the run. {_ADVICE}")
        pause = _wait(pause)
    names = [name.decode() for name in store.multi_get(keys)] if keys else []
    store.set(_members_key(token), json.dumps([_name(world_size), *names]))
    _check_sizes([_name(world_size), *names])
    return token


def _join(store: Store, rank: int, world_size: int, deadline: float) -> str:
    name = _name(world_size)
    joined = None
    pause = _FIRST_PAUSE
    while time.monotonic() <= deadline:
        if store.check([_TOKEN]):
            token = store.get(_TOKEN).decode()
            if token != joined:
                store.set(_name_key(token, rank), name)
                joined = token
            members = json.loads(store.get(_members_key(token))) if store.check([_members_key(token)]) else []
            if name in members:
                _check_sizes(members)
                return token
        pause = _wait(pause)
    missed = "rank 0 did not come to the start of the run" if joined is None else "not all ranks came to the start"
    raise PeerLostError(f"{missed}. {_ADVICE}")


_ADVICE = (
    "megatron-ext doctor --collectives finds ranks that do not answer; a slow start needs a larger "
    "--distributed-timeout-minutes."
)


def _ranks(numbers: list[str]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _name(world_size: int) -> str:
    return f"{world_size} {uuid.uuid4().hex}"


def _check_sizes(members: list[str]) -> None:
    """Refuse a launch in which one rank was told another number of ranks than rank 0."""
    sizes = [member.split()[0] for member in members]
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise ConfigurationError(
                f"$WORLD_SIZE is {sizes[0]} for rank 0, but {size} for rank {rank}: tell all ranks the same, or start "
                "them with torchrun, which does"
            )


def _name_key(token: str, rank: int) -> str:
    return f"{token}/{rank}"


def _members_key(token: str) -> str:
    return f"{token}/members"


def _wait(pause: float) -> float:
    """Sleep for `pause` seconds and return the next pause, which is longer: a thousand ranks ask one store."""
    time.sleep(pause)
    return min(_LONGEST_PAUSE, 1.5 * pause)
