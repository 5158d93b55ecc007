"""Write a checkpoint."""

import contextlib
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
from megatron_ext.checkpoint.folder import CONFIG, make_partial, partial_folder, publish
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
    _on_first_rank(run, folder, lambda: make_partial(folder, iteration))
    partial = partial_folder(folder, iteration)
    with run.gathered_parameters():
        to_save = contents.to_save(run)
        try:
            _write(to_save.state_dict, partial)
        except CheckpointException as error:
            # The engine tells every rank of a failure, but only the first rank its reason.
            reason = "; ".join(str(failure[0]) for failure in error.failures.values())
            with contextlib.suppress(OSError):
                shutil.rmtree(partial)
            raise _storage_error(folder, reason or "writing failed; rank 0 says why") from error

    # Each rank reads back what it has just written; rank 0 the rest.
    shards = _gather(run, folder, lambda: manifest.describe(partial.glob(f"__{run.rank}_*.distcp")))

    def finish() -> None:
        (partial / CONFIG).write_text(to_yaml(run.config), encoding="utf-8")
        others = manifest.describe(path for path in partial.iterdir() if path.suffix != ".distcp")
        manifest.write(partial, shards | others)
        publish(folder, iteration)

    _on_first_rank(run, folder, finish)
    return partial.with_name(f"iter_{iteration:07d}")


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


def _gather(run: Saveable, folder: str | Path, action: Callable[[], manifest.Files]) -> manifest.Files:
    """What `action` gives on all ranks; where it fails on one, every rank raises."""
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    try:
        own: manifest.Files | str = action()
    except OSError as error:
        own = f"{error.strerror}: {error.filename}"
    torch.distributed.all_gather_object(answers, own)
    for answer in answers:
        if isinstance(answer, str):
            raise _storage_error(folder, answer)
    return {name: entry for answer in answers for name, entry in answer.items()}


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
