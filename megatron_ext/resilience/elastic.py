"""Fits a run to the ranks that its launcher has: with `torchrun --nnodes MIN:MAX` their number changes.

When a machine is lost, the ranks that are left end, and torchrun starts them again as a smaller world; when one comes,
torchrun stops all with SIGTERM and starts a larger one. Everything that the training follows from (the global batch,
the order of samples, the curves) is the same in every world, and a checkpoint fits any: only the data-parallel size
changes.

A number of ranks that the layout cannot use in full leaves some over. These wait as spares: their process has nothing
to do until the run is over. If the layout needs more ranks than there are, all ranks wait. torchrun takes a waiting
process for a healthy one, and starts it again when a machine comes.

The parts that need torch import it inside, since the flags are settled first.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_ext import environment
from megatron_ext.errors import PeerLostError
from megatron_ext.terminal import say

_OVER, _BEAT, _LEFT = "elastic/over", "elastic/beat", "elastic/left"
# Seconds.
_BETWEEN_LOOKS, _BETWEEN_BEATS = 0.5, 1.0
_PATIENCE = 60.0  # with ranks that may still import, or have no processor for a while
_FOR_SPARES = 10.0  # to hear that the run is over
NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable of torchrun's environment. Without it the agents keep the address of the ranks' store that they agreed on
when they first met, and do not tell it a machine that joins later, which waits for it until all give up (torch 2.15,
elastic/rendezvous/dynamic_rendezvous.py, `next_rendezvous`)."""
_spares = 0


def ranks_to_use(launched: int, values: Mapping[str, Any], works: Callable[[int], bool]) -> int | None:
    """Return the largest number of the launched ranks that the layout can use: 0 if it needs more, None if no number
    works.

    Args:
        values: the typed values, by field name.
        works: whether the flags can work with so many ranks.
    """
    if works(launched):
        return launched
    sizes = list(_worlds(values))
    fewer = next((size for size in sorted(sizes, reverse=True) if size < launched and works(size)), None)
    if fewer is not None:
        return fewer
    return 0 if any(size > launched and works(size) for size in sizes) else None


def _worlds(values: Mapping[str, Any]) -> Iterator[int]:
    """Yield the world sizes whose data-parallel ranks share the global batch evenly, in ascending order."""
    batch, micro = values.get("global_batch_size"), values.get("micro_batch_size")
    model = 1
    for dimension in ("tensor", "pipeline", "context"):
        size = values.get(f"{dimension}_{'' if dimension == 'context' else 'model_'}parallel_size", 1)
        model *= size if isinstance(size, int) else 0
    if not (isinstance(batch, int) and isinstance(micro, int) and batch > 0 and micro > 0 and model > 0):
        return
    most = batch // micro
    if batch % micro == 0:
        yield from (model * replicas for replicas in range(1, min(most, 1 << 16) + 1) if most % replicas == 0)


def take_part(ranks: int) -> bool:
    """Let this launch be one of the first `ranks`; return whether this rank is one of them."""
    global _spares
    rank, local = environment.rank(), environment.local_rank()
    _spares = environment.world_size() - ranks
    if rank >= ranks:
        return False
    here = min(environment.local_world_size(), ranks - (rank - local))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(here))
    return True


def wait_as_spare(launched: int, used: int) -> None:
    """Wait until the ranks that train are done, or the launcher starts the ranks again.

    Raises:
        PeerLostError: the ranks that train have not been heard of for a while. torchrun does not see by itself that
            other machines are gone.
    """
    if environment.rank() == used:
        say(f"elastic: {launched} ranks are there, of which the layout uses {used}; the others wait as spares")
    try:
        heard = _hear_of_the_end(_store())
    except RuntimeError as gone:  # the store is rank 0's
        raise PeerLostError(f"this rank is a spare, and rank 0 is gone: {gone}") from gone
    if not heard:
        raise PeerLostError(
            f"this rank is a spare, and the ranks that train have not been heard of for {_PATIENCE:g} s; torchrun "
            "starts again what is left, if --max-restarts allows it"
        )


def _hear_of_the_end(store: Any) -> bool:
    """Wait until the run is over; return False where its ranks have not been heard of for too long."""
    beat, heard_at = b"", time.monotonic()
    while not store.check([_OVER]):
        time.sleep(_BETWEEN_LOOKS)
        last = store.get(_BEAT) if store.check([_BEAT]) else b""
        if last != beat:
            beat, heard_at = last, time.monotonic()
        elif time.monotonic() - heard_at > _PATIENCE:
            return False
    store.add(_LEFT, 1)
    return True


def keep_spares() -> None:
    """Let the spares know that the run lives, from a thread: every rank may call it, rank 0 does it."""
    if _spares and environment.rank() == 0:
        threading.Thread(target=_beat, args=(_store(),), name="spares", daemon=True).start()


def _beat(store: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the store has ended
        for number in itertools.count():
            store.set(_BEAT, f"{os.getpid()} {number}")
            time.sleep(_BETWEEN_BEATS)


def wait_for_more(launched: int) -> None:
    """Wait until the launcher starts the ranks again, which ends this process with SIGTERM."""
    if environment.rank() == 0:
        say(
            f"elastic: {launched} rank{'s are' if launched > 1 else ' is'} there, too few for the layout; waiting for "
            "more machines. They join by the same torchrun command; SIGTERM to torchrun ends the wait"
        )
    while True:
        time.sleep(_BETWEEN_LOOKS)


def dismiss_spares() -> None:
    """Let the spares of this launch end, when the run is over: every rank may call it, rank 0 does it."""
    if _spares and environment.rank() == 0:
        store, deadline = _store(), time.monotonic() + _FOR_SPARES
        store.set(_OVER, "1")
        while store.add(_LEFT, 0) < _spares and time.monotonic() < deadline:  # the store ends with this process
            time.sleep(_BETWEEN_LOOKS)


def _store() -> Any:
    """Return a connection to the TCPStore by which the ranks meet, once it is up."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
