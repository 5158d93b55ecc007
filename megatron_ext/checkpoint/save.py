"""Write a checkpoint."""

import errno
import os
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint import contents, manifest
from megatron_ext.checkpoint.folder import CONFIG, iteration_folder, make_partial, partial_folder, publish
from megatron_ext.checkpoint.retention import remove_expired
from megatron_ext.checkpoint.saveable import Saveable
from megatron_ext.config.files import to_yaml
from megatron_ext.errors import StorageError


def save_checkpoint(run: Saveable, folder: str | Path) -> Path:
    """Save all of `run` into `folder`, and make it the latest checkpoint there. Collective.

    Returns:
        The checkpoint, `folder/iter_*`. It is on the disk when this returns.
    Raises:
        StorageError: it cannot be written, on every rank. Earlier checkpoints are as they were.
    """
    iteration = run.state.iteration
    partial = partial_folder(folder, iteration)
    try:
        _on_first_rank(run, folder, lambda: make_partial(folder, iteration))
        with run.gathered_parameters():
            to_save = contents.to_save(run)
            _check_space(run, folder, to_save)
            _write(to_save.state_dict, partial)
        files = _describe_own_files(run, folder, partial)
        _on_first_rank(run, folder, lambda: _finish(run, folder, files))
    except CheckpointException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # The engine tells every rank of a failure, but only the first rank its reason.
        reason = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise _storage_error(folder, reason or "writing failed; rank 0 says why") from error
    except OSError as error:  # of the engine's last file, which rank 0 writes alone
        shutil.rmtree(partial, ignore_errors=True)
        raise _storage_error(folder, f"{error.strerror}: {error.filename}") from error
    except StorageError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    remove_expired(run, folder, iteration)
    return iteration_folder(folder, iteration)


def _check_space(run: Saveable, folder: str | Path, to_save: contents.Contents) -> None:
    """Better to find out before the write than in the middle of it."""
    sizes: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(sizes, contents.size(to_save))

    def check() -> None:
        free = shutil.disk_usage(folder).free
        if sum(sizes) > free:
            reason = f"{os.strerror(errno.ENOSPC)} ({sum(sizes):,} bytes are needed, {free:,} are free)"
            raise OSError(errno.ENOSPC, reason, str(folder))

    _on_first_rank(run, folder, check)


def _describe_own_files(run: Saveable, folder: str | Path, partial: Path) -> manifest.Files:
    """Every rank reads back the shards that it has just written.

    Raises:
        StorageError: one cannot, on every rank.
    """
    own: manifest.Files | str
    try:
        own = manifest.describe(partial.glob(f"__{run.rank}_*.distcp"))
    except OSError as error:
        own = f"{error.strerror}: {error.filename}"
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, own)
    for answer in answers:
        if isinstance(answer, str):
            raise _storage_error(folder, answer)
    return {name: entry for answer in answers for name, entry in answer.items()}


def _finish(run: Saveable, folder: str | Path, shards: manifest.Files) -> None:
    """What rank 0 adds to the shards; then the checkpoint gets its name."""
    partial = partial_folder(folder, run.state.iteration)
    (partial / CONFIG).write_text(to_yaml(run.config), encoding="utf-8")
    others = manifest.describe(path for path in partial.iterdir() if path.suffix != ".distcp")
    manifest.write(partial, shards | others)
    publish(folder, run.state.iteration)


def _write(state_dict: dict, folder: Path) -> None:
    # A save that is waited for writes from this process. The queue that its result comes back through need not
    # cross a process boundary; the engine's own would start a process for it, which takes seconds.
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
    dist_checkpointing.save(
        state_dict,
        str(folder),
        TorchDistSaveShardedStrategy(),
        content_metadata=dict(contents.CONTENT_METADATA),
    )


def _on_first_rank(run: Saveable, folder: str | Path, action: Callable[[], object]) -> None:
    """Call `action` on rank 0 while all wait; where it fails, every rank raises."""
    problem: list[str | None] = [None]
    if run.rank == 0:
        try:
            action()
        except OSError as error:
            problem = [f"{error.strerror}: {error.filename}"]
    torch.distributed.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise _storage_error(folder, problem[0])


def _storage_error(folder: str | Path, reason: str) -> StorageError:
    return StorageError(
        f"cannot save a checkpoint to {folder}: {reason}. Earlier checkpoints there are whole. Free space or fix the "
        "permission, or give another folder with --save, and resume with --load."
    )
