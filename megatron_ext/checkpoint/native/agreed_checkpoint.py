"""All ranks go on from one checkpoint: the first that is whole, of those that the first rank sees."""

from collections.abc import Callable
from pathlib import Path

import torch

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.checkpoint_folder import SavedCheckpoint
from megatron_ext.checkpoint.native.resume import Resume, Search, read_resume
from megatron_ext.config.schema import CheckpointConfig
from megatron_ext.errors import DataError, StorageError, TrainingError
from megatron_ext.terminal import warn
from megatron_ext.untrusted.untrusted_folder import check_folder


def agree(search: Search, flags: CheckpointConfig) -> Resume | None:
    """Settle on the checkpoint that every rank goes on from. Collective; equal on every rank.

    All files of it have then been read and compared with its manifest. The first rank's search counts, and its reading
    of the configuration and of the data record: on a network file system others may still see an older folder.

    Returns:
        None where the folder holds no checkpoint.
    Raises:
        DataError, StorageError: as `first_whole`.
        ConfigurationError: the checkpoint's configuration is larger or deeper than any.
    """
    chosen = first_whole(lambda: search, flags)
    if chosen is None:
        return None
    checkpoint, damaged = chosen
    return told_by_the_first_rank(
        lambda: read_resume(checkpoint, use_checkpoint_args=flags.use_checkpoint_args, damaged=damaged)
    )


def first_whole(search: Callable[[], Search], flags: CheckpointConfig) -> tuple[SavedCheckpoint, list[str]] | None:
    """Return the first candidate that agrees with its manifest, and the problems of the candidates before it.
    Collective.

    Args:
        search: called on the first rank alone.
        flags: --no-fallback forbids to pass one over.
    Returns:
        None where the folder holds no checkpoint.
    Raises:
        DataError: no checkpoint is as it was written, or --load names none.
        StorageError: the folder cannot be read.
    """
    folder, candidates = told_by_the_first_rank(lambda: _candidates(search()))
    damaged: list[str] = []
    for candidate in candidates:
        if candidate.warning:
            _warn(candidate.warning)
        problems = damage(candidate.path)
        if not problems:
            if problems is None:
                _warn(f"{candidate.path} has no manifest: whether it is damaged is not known")
            if damaged:
                _warn(f"{'; '.join(damaged)}; using the next whole checkpoint, {candidate.path}")
            return candidate, damaged
        damaged.append(f"the checkpoint {candidate.path} is damaged ({', '.join(problems[:5])})")
        if flags.no_fallback:
            others = [str(other.iteration) for other in candidates if other is not candidate]
            offer = f"leave --no-fallback out to use another: {', '.join(others)}" if others else "there is no other"
            raise DataError(f"{damaged[0]}; {offer}.")
    if damaged:
        raise DataError(
            f"{'; '.join(damaged)}; there is no whole checkpoint in {folder}. Give another folder with --load."
        )
    return None


def _candidates(search: Search) -> tuple[str, tuple[SavedCheckpoint, ...]]:
    if isinstance(search.error, OSError):
        raise StorageError(f"--load {search.folder}: {search.error.strerror}. Fix the folder, or give another one.")
    if search.error is not None:
        raise search.error
    return search.folder, search.candidates


def told_by_the_first_rank[T](make: Callable[[], T]) -> T:
    """Return the first rank's result on every rank, or raise the first rank's error on every rank."""
    answer: list[T | TrainingError | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            answer = [make()]
        except TrainingError as error:
            answer = [error]
    torch.distributed.broadcast_object_list(answer, src=0)
    [told] = answer
    if isinstance(told, TrainingError):
        raise told
    assert told is not None
    return told


def _warn(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        warn(text)


def damage(checkpoint: Path) -> list[str] | None:
    """Return the problems of the checkpoint; empty where it is whole. Collective; equal on every rank.

    Returns:
        None where it has no manifest, so that nothing can be said.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    damages: list[str] | None
    try:
        if rank == 0:
            check_folder(checkpoint)
        files = checkpoint_manifest.read(checkpoint)
    except (OSError, ValueError, DataError) as error:
        files, damages = {}, [str(error)]
    else:
        damages = None if files is None else []
    if files:
        by_size = sorted(files, key=lambda name: (files[name]["bytes"], name))
        own = {name: files[name] for name in by_size[rank::world_size]}
        damages = checkpoint_manifest.problems(checkpoint, own)
    answers: list[list[str] | None] = [None] * world_size
    torch.distributed.all_gather_object(answers, damages)
    if all(answer is None for answer in answers):
        return None
    return list(dict.fromkeys(problem for answer in answers for problem in answer or ()))
