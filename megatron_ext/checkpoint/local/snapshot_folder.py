"""Names the files of snapshots. This needs no torch.

    DIR/3f2a.../iter_0000010/rank_00003        of the run whose --save hashes to 3f2a...
    DIR/3f2a.../iter_0000010/rank_00003.copy   of a rank of another machine

DIR lies on every machine, and holds what the ranks of that machine wrote.
"""

import dataclasses
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_ext import environment
from megatron_ext.checkpoint.native.checkpoint_folder import iteration_folder
from megatron_ext.config.schema import Config

KEPT = 2
"""How many snapshots stay: the newest may not be complete on every rank."""

COPY = ".copy"
_FILE = re.compile(r"rank_([0-9]{5,})(\.copy)?")
_ITERATION = re.compile(r"iter_([0-9]{7,})")
# Of the layout: what does not change which rank holds which tensors.
_FREE = ("distributed_timeout_minutes", "distributed_backend", "elastic")


def folder_of(config: Config) -> Path | None:
    """Return where this machine keeps the run's snapshots; None where it is to take none."""
    flags = config.checkpoint
    if flags.non_persistent_local_ckpt_dir is None or flags.save is None:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(flags.save))).hexdigest()[:16]
    return Path(flags.non_persistent_local_ckpt_dir) / name


def file_of(folder: Path, iteration: int, rank: int, *, copy: bool = False) -> Path:
    """Return where the snapshot of a rank lies, or another machine's copy of it."""
    return iteration_folder(folder, iteration) / f"rank_{rank:05d}{COPY if copy else ''}"


def layout_of(config: Config) -> dict[str, Any]:
    """Return what must be the same for a rank to read what its like has written."""
    layout = {name: value for name, value in dataclasses.asdict(config.layout).items() if name not in _FREE}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in layout.items()}
    return {**plain, "optimizer": config.optimizer.optimizer, "params_dtype": config.training.params_dtype}


def iterations(folder: Path) -> list[int]:
    """Return the iterations of which there is something here, in ascending order."""
    names = os.listdir(folder) if folder.is_dir() else []
    matches = [_ITERATION.fullmatch(name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def ranks_at(folder: Path, iteration: int) -> dict[int, Path]:
    """Return the files of an iteration by the rank whose they are; its own before a copy."""
    there = iteration_folder(folder, iteration)
    names = sorted(os.listdir(there), reverse=True) if there.is_dir() else []
    matches = {name: _FILE.fullmatch(name) for name in names}
    return {int(match[1]): there / name for name, match in matches.items() if match}


def remove_old(folder: Path, newest: int) -> None:
    """Remove all but the newest `KEPT` of those up to `newest`. One rank of the machine does it for all."""
    _remove(folder, [iteration for iteration in iterations(folder) if iteration <= newest][:-KEPT])


def remove_later(folder: Path, newest: int) -> None:
    """Remove those after `newest`, which are of another course of the run; before the training, since a faster rank of
    the machine may write the next one already."""
    _remove(folder, [iteration for iteration in iterations(folder) if iteration > newest])


def remove_all(folder: Path) -> None:
    """Remove the snapshots of the run on this machine. One rank of it does so for all."""
    if environment.local_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, these: list[int]) -> None:
    for iteration in these if environment.local_rank() == 0 else ():
        shutil.rmtree(iteration_folder(folder, iteration), ignore_errors=True)
