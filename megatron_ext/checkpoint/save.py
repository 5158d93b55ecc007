"""Write a checkpoint."""

import errno
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint import checksums, contents, manifest
from megatron_ext.checkpoint.beside import keep_tokenizer, write_versions
from megatron_ext.checkpoint.folder import (
    CONFIG,
    DATA,
    iteration_folder,
    make_partial,
    partial_folder,
    publish,
    saved_iterations,
)
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
    return Save(run, folder, background=False).finish()


class Save:
    """A save in progress: begun here, ended by `finish`. Both are collective and raise as `save_checkpoint` does.

    In the background, a thread writes a copy that was taken when the save began; until `finish`, the checkpoint has
    no name yet. (The engine would fork a process for it, which holds what the training process has open.)
    """

    def __init__(self, run: Saveable, folder: str | Path, *, background: bool):
        self.run, self.folder, self.iteration = run, folder, run.state.iteration
        self._partial = partial_folder(folder, self.iteration)
        self._files: manifest.Files | str = {}
        self._thread: threading.Thread | None = None
        with self._failures():
            _on_first_rank(run, folder, lambda: make_partial(folder, self.iteration))
            with run.gathered_parameters():
                to_save = contents.to_save(run)
                _check_space(run, folder, to_save)
                live = contents.storages(to_save) if background else set()
                self._request = _prepare(to_save.state_dict, self._partial)
                self._checksums = checksums.watch(self._request)
                buckets = _host_copy(self._request, live)
            if background:
                self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint", daemon=True)
                self._thread.start()
            else:
                self._write(buckets)

    def written(self) -> bool:
        """Whether all ranks have written their shards, so that `finish` need not wait. Collective."""
        waiting = torch.tensor(int(self._thread is not None and self._thread.is_alive()))
        waiting = waiting.to(self.run.device.torch_device)
        torch.distributed.all_reduce(waiting, op=torch.distributed.ReduceOp.MAX)
        return not waiting.item()

    def finish(self) -> Path:
        """Wait for the shards, and give the checkpoint its name."""
        if self._thread is not None:
            self._thread.join()
        torch.distributed.barrier()
        with self._failures():
            for finalize in self._request.finalize_fns:
                finalize()
            files = _gather_files(self.folder, self._files)
            _on_first_rank(self.run, self.folder, lambda: self._publish(files))
        remove_expired(self.run, self.folder, self.iteration)
        return iteration_folder(self.folder, self.iteration)

    def _write(self, buckets: Any) -> None:
        """This rank's shards. Failures wait for `finish`."""
        try:
            write_shards(self._request, buckets)
            self._files = self._checksums.files()
        except OSError as error:
            self._files = f"{error.strerror}: {error.filename}"
        except Exception as error:
            self._files = f"{type(error).__name__}: {error}"

    def _publish(self, shards: manifest.Files) -> None:
        """What rank 0 adds to the shards; then the checkpoint gets its name."""
        (self._partial / CONFIG).write_text(to_yaml(self.run.config), encoding="utf-8")
        if self.run.data_record is not None:
            (self._partial / DATA).write_text(json.dumps(self.run.data_record, indent=1) + "\n", encoding="utf-8")
        earlier = (iteration_folder(self.folder, step) for step in reversed(saved_iterations(self.folder)))
        keep_tokenizer(self.run.config.data, self._partial, earlier)
        write_versions(self._partial)
        others = [path for path in manifest.all_files(self._partial) if path.suffix != ".distcp"]
        manifest.write(self._partial, shards | manifest.describe(self._partial, others))
        publish(self.folder, self.iteration)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Whatever fails inside leaves no partial folder, and is a StorageError."""
        try:
            yield
        except CheckpointException as error:
            # The engine tells every rank of a failure, but only the first rank its reason.
            reason = "; ".join(str(failure[0]) for failure in error.failures.values())
            shutil.rmtree(self._partial, ignore_errors=True)
            raise _storage_error(self.folder, reason or "writing failed; rank 0 says why") from error
        except OSError as error:  # of the engine's last file, which rank 0 writes alone
            shutil.rmtree(self._partial, ignore_errors=True)
            raise _storage_error(self.folder, f"{error.strerror}: {error.filename}") from error
        except StorageError:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise


def write_shards(request: AsyncRequest, buckets: Any) -> None:
    """The engine's writer, here and now."""
    if request.async_fn is not None:
        rank, _, results = request.async_fn_args
        with checksums.without_checksums_of_torch():
            request.async_fn(rank, buckets, results, **request.async_fn_kwargs)


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


def _prepare(state_dict: dict, folder: Path) -> AsyncRequest:
    """Who writes what, and how the engine ends the save."""
    # The results of a write in this process need not cross a process boundary; the engine's own queue would start a
    # process for it, which takes seconds.
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
    request = dist_checkpointing.save(
        state_dict,
        str(folder),
        TorchDistSaveShardedStrategy(),
        content_metadata=dict(contents.CONTENT_METADATA),
        async_sharded_save=True,
        async_strategy="mcore",
    )
    assert request is not None
    return request


def _host_copy(request: AsyncRequest, live: Collection[int]) -> Any:
    """The engine's (file, key, (objects, tensors)) with all tensors in host memory, none in that of `live` storages."""
    if request.preload_fn is None:  # this rank writes nothing
        return None
    return [
        (file, key, (objects, [(item, t.clone() if _storage(t) in live else t) for item, t in tensors]))
        for file, key, (objects, tensors) in request.preload_fn()
    ]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _gather_files(folder: str | Path, own: manifest.Files | str) -> manifest.Files:
    """The files of all ranks; where one failed, every rank raises."""
    answers: list[Any] = [None] * torch.distributed.get_world_size()
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
