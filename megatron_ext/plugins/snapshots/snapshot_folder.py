"""Names the files of snapshots, removes old ones, and moves them between machines, in pieces, over host memory.

    DIR/3f2a.../iter_0000010/rank_00003        of the run whose --save hashes to 3f2a...
    DIR/3f2a.../iter_0000010/rank_00003.copy   of a rank of another machine

DIR lies on every machine, and holds the files that the ranks of that machine wrote.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_ext import environment
from megatron_ext.checkpoint.native.checkpoint_folder import iteration_folder
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.durable import only_files
from megatron_ext.plugins.snapshots.flags import SnapshotFlags

KEPT = 2
"""Number of snapshots that are kept: the newest may not be complete on every rank."""

COPY = ".copy"
_FILE = re.compile(r"rank_([0-9]{5,})(\.copy)?")
_ITERATION = re.compile(r"iter_([0-9]{7,})")
# Of the layout: what does not change which rank holds which tensors.
_FREE = ("distributed_timeout_minutes", "distributed_backend", "nccl_backend", "elastic")


def folder_of(config: Config) -> Path | None:
    """Return the folder in which this machine keeps the run's snapshots; None where it is to take none."""
    folder, save = flags_of(config.checkpoint, SnapshotFlags).non_persistent_local_ckpt_dir, config.checkpoint.save
    if folder is None or save is None:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(save))).hexdigest()[:16]
    return Path(folder) / name


def file_of(folder: Path, iteration: int, rank: int, *, copy: bool = False) -> Path:
    """Return the path of a rank's snapshot, or of another machine's copy of it."""
    return iteration_folder(folder, iteration) / f"rank_{rank:05d}{COPY if copy else ''}"


def layout_of(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal for a rank to read the snapshot of the rank of the same number."""
    layout = {name: value for name, value in dataclasses.asdict(config.layout).items() if name not in _FREE}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in layout.items()}
    return {**plain, "optimizer": config.optimizer.optimizer, "params_dtype": config.training.params_dtype}


def iterations(folder: Path) -> list[int]:
    """Return the iterations of which this folder has files, in ascending order."""
    names = os.listdir(folder) if folder.is_dir() else []
    matches = [_ITERATION.fullmatch(name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def ranks_at(folder: Path, iteration: int) -> dict[int, Path]:
    """Return the files of an iteration by the rank whose snapshot they are; the rank's own file before a copy."""
    checkpoint = iteration_folder(folder, iteration)
    names = sorted(os.listdir(checkpoint), reverse=True) if checkpoint.is_dir() else []
    matches = {name: _FILE.fullmatch(name) for name in names}
    return {int(match[1]): checkpoint / name for name, match in matches.items() if match}


def remove_old(folder: Path, newest: int) -> None:
    """Remove all but the newest `KEPT` of the snapshots up to `newest`. One rank of the machine does it for all."""
    _remove(folder, [iteration for iteration in iterations(folder) if iteration <= newest][:-KEPT])


def remove_later(folder: Path, newest: int) -> None:
    """Remove the snapshots after `newest`, which belong to another course of the run; before the training, since a
    faster rank of the machine may write the next one already."""
    _remove(folder, [iteration for iteration in iterations(folder) if iteration > newest])


def remove_all(folder: Path) -> None:
    """Remove the snapshots of the run on this machine. One rank of it does so for all."""
    if environment.local_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, these: list[int]) -> None:
    for iteration in these if environment.local_rank() == 0 else ():
        shutil.rmtree(iteration_folder(folder, iteration), ignore_errors=True)


_PIECE = 1 << 26  # bytes


def send_file(source: Path | None, target: Path | None, sender: int, receiver: int, group: Any) -> str | None:
    """Send a file from one rank to another; return the failure in words, or None. Both call it.

    Args:
        source: the file, on the sender.
        target: its place, on the receiver.
        group: over gloo.
    """
    if source is not None:
        return _send(source, receiver, group)
    assert target is not None
    return _receive(target, sender, group)


def exchange(source: Path, to: int, target: Path, origin: int, group: Any) -> str | None:
    """Send a file to rank `to` while one comes from rank `origin`, in pieces in turn; return the failure in words, or
    None.

    Without a file, nothing is sent; pieces that cannot be written are received all the same, or the other rank would
    wait.
    """
    size = torch.tensor([source.stat().st_size if source.exists() else 0])
    coming = torch.zeros(1, dtype=torch.int64)
    _both(size, to, coming, origin, group)
    temporary = target.with_name(f"{target.name}.partial")
    with contextlib.ExitStack() as files:
        file = files.enter_context(source.open("rb", buffering=0)) if int(size) else None
        into, problem = _opened(temporary, files)
        for begin in range(0, max(int(size), int(coming)), _PIECE):
            sending = _read_piece(file, int(size) - begin)
            receiving = torch.empty(max(0, min(_PIECE, int(coming) - begin)), dtype=torch.uint8)
            _both(sending, to, receiving, origin, group)
            problem = problem or _write_piece(into, receiving)
    return _ended(temporary, target if int(coming) else None, problem)


def _both(sending: torch.Tensor, to: int, receiving: torch.Tensor, origin: int, group: Any) -> None:
    works = []
    if sending.numel():
        works.append(torch.distributed.isend(sending, to, group))
    if receiving.numel():
        works.append(torch.distributed.irecv(receiving, origin, group))
    for work in works:
        work.wait()


def _send(source: Path, receiver: int, group: Any) -> str | None:
    size = torch.tensor([source.stat().st_size])
    torch.distributed.send(size, receiver, group)
    with source.open("rb", buffering=0) as file:
        for begin in range(0, int(size), _PIECE):
            torch.distributed.send(_read_piece(file, int(size) - begin), receiver, group)
    return None


def _receive(target: Path, sender: int, group: Any) -> str | None:
    size = torch.zeros(1, dtype=torch.int64)
    torch.distributed.recv(size, sender, group)
    temporary = target.with_name(f"{target.name}.partial")
    with contextlib.ExitStack() as files:
        into, problem = _opened(temporary, files)
        for begin in range(0, int(size), _PIECE):
            piece = torch.empty(min(_PIECE, int(size) - begin), dtype=torch.uint8)
            torch.distributed.recv(piece, sender, group)
            problem = problem or _write_piece(into, piece)
    return _ended(temporary, target, problem)


def _opened(temporary: Path, files: contextlib.ExitStack) -> tuple[Any, str | None]:
    """Open a file to receive into; where that fails, return the failure in words. The pieces come all the same."""
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        return files.enter_context(open(temporary, "wb", buffering=0, opener=only_files)), None
    except OSError as error:
        return None, f"{error.strerror}: {error.filename}"


def _ended(temporary: Path, target: Path | None, problem: str | None) -> str | None:
    """Give a file that was received its name; where something failed, or it has no `target`, remove it. Return the
    failure in words, or None."""
    try:
        if problem is None and target is not None:
            os.replace(temporary, target)
        else:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        return problem or f"{error.strerror}: {error.filename}"
    return problem


def _read_piece(file: Any, left: int) -> torch.Tensor:
    """Return the next bytes; zeros where the file has fewer than it had, which its checksum shows."""
    piece = torch.zeros(max(0, min(_PIECE, left)), dtype=torch.uint8)
    view = memoryview(piece.numpy())
    while file is not None and view.nbytes and (count := file.readinto(view)):
        view = view[count:]
    return piece


def _write_piece(file: Any, piece: torch.Tensor) -> str | None:
    left = memoryview(piece.numpy())
    try:
        while left.nbytes:
            left = left[file.write(left) :]
    except OSError as error:
        return f"{error.strerror}: {file.name}"
    return None
