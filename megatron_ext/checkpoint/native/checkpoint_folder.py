"""Finds and names the contents of a checkpoint folder, under Megatron-LM's names. This needs no torch.

    SAVE/latest_checkpointed_iteration.txt     "10": the tracker, written last ("release": Megatron-LM's weights alone)
    SAVE/iter_0000010/                         whole, whenever a folder of this name exists
    SAVE/.iter_0000010.partial/                being written, or left by a process that was killed

A checkpoint is written under the partial name, flushed to the disk, and renamed: at every moment of a save, and
after a kill at any of them, each `iter_*` folder is either absent or whole, and the tracker is the old or the new one.
"""

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.durable import replacing, sync
from megatron_ext.errors import DataError

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "config.yaml"
DATA = "data.json"
RELEASE = "release"
"""Content of the tracker, and name of the folder, in which Megatron-LM's tools put weights alone."""

_ITERATION = re.compile(r"iter_([0-9]{7,})")
_LEFTOVER = re.compile(r"\.iter_[0-9]{7,}\.(partial|replaced|removed)")
# megatron-core writes both at the end of a save, after all shards.
_WRITTEN_LAST = (".metadata", "metadata.json")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to resume from."""

    path: Path
    iteration: int
    warning: str | None = None
    """Reason why it is not the checkpoint that the tracker names."""


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Return the folder of the checkpoint of `iteration`."""
    return Path(folder) / f"iter_{iteration:07d}"


def partial_folder(folder: str | Path, iteration: int) -> Path:
    """Return the folder in which the checkpoint of `iteration` is written before it is whole."""
    return Path(folder) / f".iter_{iteration:07d}.partial"


def saved_iterations(folder: str | Path) -> list[int]:
    """Return the iterations of all whole checkpoints, in ascending order; empty where there is no such folder."""
    try:
        names = [name for name in os.listdir(folder) if _ITERATION.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    iterations = {name: int(name.removeprefix("iter_")) for name in names}
    # Other programs may write more zeros; such a folder is not where the iteration is looked for.
    proper = {iteration for name, iteration in iterations.items() if iteration_folder(folder, iteration).name == name}
    return sorted(iteration for iteration in proper if _is_whole(iteration_folder(folder, iteration)))


def without_checkpoint(folder: str | Path) -> str:
    """Return the words about a folder that holds no checkpoint: of a run by `megatron-ext new`, which holds its own one
    folder below, with that folder."""
    inside = Path(folder) / "checkpoints"
    fix = f"use {inside}, which does" if saved_iterations(inside) else "name a folder that --save wrote"
    return f"{folder} holds no checkpoint; {fix}"


def find_latest(folder: str | Path) -> SavedCheckpoint | None:
    """Return the first of `find_all`."""
    return next(iter(find_all(folder)), None)


def checkpoint_at(path: Path) -> Path | None:
    """Return the checkpoint that `path` is, or the latest one of the --save folder that it is; None where it is
    neither.

    Raises:
        DataError, OSError: as `find_to_load`.
    """
    if (path / ".metadata").is_file():
        return path
    candidates = find_to_load(path)
    return candidates[0].path if candidates else None


def find_to_load(load: str | Path, step: int | None = None) -> list[SavedCheckpoint]:
    """Return the checkpoints that --load and --ckpt-step ask for, in the order in which to try them.

    Args:
        load: a --save folder, or one checkpoint in it, which is then the only one to try.
        step: the iteration of --ckpt-step.

    Returns:
        An empty list where `load` is a folder without a checkpoint, from which a run starts afresh.
    Raises:
        DataError: the checkpoint that is named is missing or not whole; otherwise as `find_all`.
        OSError: the folder cannot be read.
    """
    named = _named_checkpoint(load)
    if named is None:
        return find_all(load) if step is None else [find_iteration(load, step)]
    if named.name != RELEASE:
        return [find_iteration(named.parent, int(named.name.removeprefix("iter_")))]
    if not _is_whole(named):
        raise DataError(f"{named} is not whole, or in Megatron-LM's legacy format: a free pickle, which is not read.")
    return [SavedCheckpoint(named, 0)]


def load_problem(load: str, step: int | None) -> str | None:
    """Return why --load cannot be the folder that the user means, whatever is in it; None where it can."""
    path, named = Path(load), _named_checkpoint(load)
    if path.exists() and not path.is_dir():
        return f"--load {load} is a file, not a folder of checkpoints; use --load {path.parent}"
    if named is None and (path / ".metadata").is_file():
        return (
            f"--load {load} is one checkpoint, but its name does not say of which iteration; rename it to iter_ and "
            "the iteration in seven digits, or name the folder that --save wrote"
        )
    if named is not None and step is not None and named.name != iteration_folder("", step).name:
        return f"--load {load} names one checkpoint and --ckpt-step {step} another; leave --ckpt-step out"
    return None


def _named_checkpoint(load: str | Path) -> Path | None:
    """Return the one checkpoint that `load` names, which may be missing; None for a folder of checkpoints."""
    for path in (Path(load), Path(load).resolve()):  # the latter for a link, and for "."
        if _ITERATION.fullmatch(path.name) and not (path / TRACKER).exists() and not saved_iterations(path):
            return path
        # Other folders may have this name too, even one that the run is to begin.
        if path.name == RELEASE and ((path / ".metadata").is_file() or any(path.glob("mp_rank_*"))):
            return path
    return None


def find_all(folder: str | Path) -> list[SavedCheckpoint]:
    """Return the whole checkpoints in the order in which to try them: the one that the tracker names, then the newest
    first.

    Returns:
        An empty list where the folder holds neither a tracker nor a checkpoint.
    Raises:
        DataError: there is a tracker, but no whole checkpoint.
        OSError: the folder cannot be read.
    """
    tracker = Path(folder) / TRACKER
    newest_first = saved_iterations(folder)[::-1]
    said = _tracked(tracker)
    if said is not None and said.isdecimal() and int(said) in newest_first:
        return [find_iteration(folder, step) for step in sorted(newest_first, key=lambda step: step != int(said))]
    if said == RELEASE and _is_whole(Path(folder) / RELEASE):
        return [SavedCheckpoint(Path(folder) / RELEASE, 0)]
    if said is None:
        problem = f"{tracker} is missing"
    elif said.isdecimal():
        problem = f"{tracker} names iteration {said}, which is missing or not whole"
        if list(iteration_folder(folder, int(said)).glob("mp_rank_*")):
            problem += " (it is in Megatron-LM's legacy format: a free pickle, which is not read)"
    else:
        problem = f"{tracker} holds {said!r} instead of an iteration"
    if not newest_first:
        if said is None:
            return []
        raise DataError(
            f"{problem}, and there is no whole checkpoint in {folder}. Give the right folder with --load, or remove "
            "the file to start afresh."
        )
    candidates = [find_iteration(folder, step) for step in newest_first]
    newest = candidates[0]
    return [replace(newest, warning=f"{problem}; using the newest whole checkpoint, {newest.path}"), *candidates[1:]]


def find_iteration(folder: str | Path, iteration: int) -> SavedCheckpoint:
    """Return the checkpoint of `iteration`.

    Raises:
        DataError: there is no such checkpoint, or it is not whole.
    """
    path = iteration_folder(folder, iteration)
    if not path.is_dir() or not _is_whole(path):
        saved = ", ".join(map(str, saved_iterations(folder))) or "none"
        raise DataError(f"{path} is missing or not whole; the whole checkpoints in {folder} are those of: {saved}.")
    return SavedCheckpoint(path, iteration)


def make_partial(folder: str | Path, iteration: int) -> Path:
    """Make an empty folder to write the checkpoint of `iteration` into. Leftovers of killed saves are removed.

    Raises:
        OSError: the folder cannot be made.
    """
    partial = partial_folder(folder, iteration)
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    partial.mkdir()
    return partial


def remove_leftovers(folder: str | Path) -> None:
    """Remove the folders of saves that did not end: folders of exactly the names that saves use, and nothing else."""
    for name in os.listdir(folder):
        if _LEFTOVER.fullmatch(name):
            _remove_entry(Path(folder, name))


def remove(folder: str | Path, iteration: int) -> None:
    """Remove the checkpoint of `iteration`: rename its folder first, so that one that is half removed never passes for
    a whole one."""
    path = iteration_folder(folder, iteration)
    removed = path.with_name(f".{path.name}.removed")
    path.rename(removed)
    _remove_entry(removed)


def publish(folder: str | Path, iteration: int) -> Path:
    """Make the written checkpoint of `iteration` the latest one: flush it, rename it, and then set the tracker.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    partial, final = partial_folder(folder, iteration), iteration_folder(folder, iteration)
    for entry in (*partial.rglob("*"), partial):
        sync(entry)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():  # of a run that took another course from an earlier checkpoint
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    write_tracker(folder, iteration)
    with suppress(OSError):
        _remove_entry(replaced)
    return final


def write_tracker(folder: str | Path, iteration: int) -> None:
    """Set the tracker in one step: a reader sees the old or the new one, never a part."""
    tracker = Path(folder) / TRACKER
    with replacing(tracker) as file:
        file.write(str(iteration).encode())
    sync(tracker.parent)


def _remove_entry(path: Path) -> None:
    """Remove a folder with all that is in it; of a link, only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)  # which follows no links inside


def _tracked(tracker: Path) -> str | None:
    """Return the tracker's text; None where there is no tracker, empty where it is no file."""
    if not tracker.exists():
        return None
    if not tracker.is_file():
        return ""
    with tracker.open("rb") as file:
        return file.read(100).decode(errors="replace").strip()


def _is_whole(checkpoint: Path) -> bool:
    return all((checkpoint / name).is_file() for name in _WRITTEN_LAST)
