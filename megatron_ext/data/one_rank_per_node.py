"""Files that one rank of a node reads or writes for all ranks of the node, and how the other ranks wait for it."""

import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, cast

import torch

from megatron_ext import environment
from megatron_ext.errors import DataError, TrainingError


def read_once_per_node(read: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Call `read` on one rank of each node, and return the result of rank 0 on every rank. Collective, if there are
    ranks.

    Args:
        read: returns, by the name of a file, a digest of what the run reads in it.

    Raises:
        DataError: a node has another file than rank 0; on every rank.
        TrainingError, OSError: one of these ranks raised it; it is raised on every rank.
    """
    if not torch.distributed.is_initialized():
        return read()
    rank = torch.distributed.get_rank()
    values, problem = {}, None
    if rank == 0 or environment.local_rank() == 0:
        try:
            values = read()
        except (TrainingError, OSError) as error:
            problem = error
    of_rank_0: list[Any] = [(values, problem) if rank == 0 else None]
    torch.distributed.broadcast_object_list(of_rank_0, src=0)
    agreed, problem_of_rank_0 = of_rank_0[0]
    if problem_of_rank_0 is not None:
        raise problem_of_rank_0
    if problem is None:
        pairs = zip(values.items(), agreed.values(), strict=True) if values else ()
        problem = next((_differs(name) for (name, own), other in pairs if own != other), None)
    _raise_together(problem)
    return agreed


def _differs(name: str) -> DataError:
    return DataError(
        f"{name} is another file on {socket.gethostname()}, which rank {environment.rank()} is on, than on the node of "
        "rank 0: their ranks would train on other samples. Copy the same files to every node, or keep them where all "
        "nodes see them"
    )


def one_rank_of_a_node_first[T](folder: os.PathLike[str], build: Callable[[], T]) -> T:
    """Call `build`, which writes the files that `folder` lacks, on all ranks. Collective.

    Rank 0 goes first, together with the first rank of each node that does not see rank 0's `folder`; then the others.

    Raises:
        TrainingError: one of the first ranks raised it; it is raised on every rank.
    """
    if not torch.distributed.is_initialized():
        return build()
    rank, local_rank = torch.distributed.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    mark: list[Any] = [_make_mark(folder) if rank == 0 else None]
    torch.distributed.broadcast_object_list(mark, src=0)
    shared = mark[0] is not None and os.path.exists(os.path.join(folder, mark[0]))
    goes_first = rank == 0 or (local_rank == 0 and not shared)
    result, problem = None, None
    if goes_first:
        try:
            result = build()
        except TrainingError as error:
            problem = error
    try:
        _raise_together(problem)
    finally:
        if rank == 0 and mark[0] is not None:
            os.unlink(os.path.join(folder, mark[0]))
    return cast(T, result) if goes_first else build()


def _raise_together(problem: BaseException | None) -> None:
    """Raise the first rank's problem on every rank. Collective."""
    problems: list[BaseException | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    for one in problems:
        if one is not None:
            raise one


def _make_mark(folder: os.PathLike[str]) -> str | None:
    """Make an empty file that shows other nodes whether they see this folder; return None where it cannot be
    written."""
    name = f".{secrets.token_hex(8)}.mark"
    try:
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, name), "x").close()
    except OSError:
        return None  # building says what is wrong, if something has to be written
    return name
