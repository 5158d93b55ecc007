"""Writes a checkpoint."""

import errno
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import state_dict_utils
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint import written_checksums
from megatron_ext.checkpoint.native import checkpoint_manifest, checkpoint_state_dict
from megatron_ext.checkpoint.native.checkpoint_folder import (
    CONFIG,
    DATA,
    iteration_folder,
    make_partial,
    partial_folder,
    publish,
    saved_iterations,
)
from megatron_ext.checkpoint.native.extra_files import keep_tokenizer, write_versions
from megatron_ext.checkpoint.native.lock import hold_again, is_lost
from megatron_ext.checkpoint.native.retention import remove_expired
from megatron_ext.checkpoint.native.snapshot import HostGroups, HostMemory, Saveable, as_it_is
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.device.device_protocol import Device
from megatron_ext.durable import check_space, naming
from megatron_ext.errors import FolderRemovedError, SaveFailedError, StorageError, TrainingError
from megatron_ext.sharding.parts import IN_PLACE, Exchange


def save_checkpoint(run: Saveable, folder: str | Path) -> Path:
    """Save all of `run` into `folder`, and make it the folder's latest checkpoint. Collective.

    Returns:
        The checkpoint, `folder/iter_*`. It is on the disk when the function returns.
    Raises:
        SaveFailedError: the checkpoint cannot be written; raised on every rank. Earlier checkpoints are as they were,
            unless it is a FolderRemovedError: somebody has removed the folder.
        StorageError: this rank alone met an error, of which the others do not hear.
    """
    return Save(run, folder, background=False).finish()


class Kept:
    """Objects that one save of a run hands on to the next: the plan, and host memory and groups, with which later
    background saves stop the training for a copy alone."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.exchange = Exchange(HostGroups().of, torch.device("cpu"))
        self.strategy = _PlannedOnce(cached_metadata=True)
        self.models: checkpoint_state_dict.Contents | None = None
        self.size: int | None = None
        """Bytes of a checkpoint, once one was begun."""


class _PlannedOnce(TorchDistSaveShardedStrategy):
    """Lets megatron-core's plan of the first save serve all saves: a run's tensors do not change their names and cuts.

    (By itself, the engine takes a plan for settled after two that are equal.) It asks no other rank then.
    """

    failure: OSError | None = None
    """Error by which the first rank, which alone writes the checkpoint's metadata, could not write it in the save under
    way: the other ranks wait for its result, and would wait for ever."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: Any) -> Any:
        if save_state_dict_ret[1] is not None:  # on the first rank, which writes it
            self.cached_global_metadata = save_state_dict_ret[1]
        self.validated_cache_reuse = True
        self.failure, finish = None, writer.finish

        def finish_or_remember(*arguments: Any) -> None:
            try:
                finish(*arguments)
            except OSError as error:
                self.failure = error

        writer.finish = finish_or_remember
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


class Save:
    """A save in progress: begun here, ended by `finish`. Both are collective and raise as `save_checkpoint` does.

    In the background, a thread writes a copy that was begun with the save: call `hold_update` before the next update of
    the weights. Until `finish`, the checkpoint has no name yet. (megatron-core would fork a process for it, which
    inherits the files that the training process has open.) With what was `kept` of an earlier save of the run, no plan
    is made again, and in the background that thread also exchanges shards, in groups of its own.
    """

    _asked: Callable[[], list[float]] | None = None
    """Reads the answer that the last call of `written` asked for; None before the first call."""

    def __init__(self, run: Saveable, folder: str | Path, *, background: bool, kept: Kept | None = None):
        self.run, self.folder, self.iteration = run, folder, run.state.iteration
        self._partial = partial_folder(folder, self.iteration)
        self._kept = kept or Kept()
        self._files: checkpoint_manifest.Files | str = {}
        self._request: AsyncRequest | None = None
        self._thread: threading.Thread | None = None
        self._copies = run.device.copies()
        aside = background and self._kept.size is not None
        with self._failures():
            _on_first_rank(run, folder, self._begin)
            with run.gathered_parameters():
                copy = partial(self._kept.memory.copy, self._copies) if background else as_it_is
                snapshot = checkpoint_state_dict.take(run, copy, self._kept.models)
                if background:
                    self._kept.models = snapshot.models
                if not aside:
                    self._copies.wait()
                    self._prepare(snapshot, background)
                if not background:
                    self._write(None)
            if background:
                arguments = (snapshot if aside else None,)
                self._thread = threading.Thread(target=self._write_aside, args=arguments, daemon=True)
                self._thread.start()

    def written(self) -> bool:
        """Return whether all ranks have written their shards, so that `finish` need not wait. Collective.

        Where reads wait, the answer belongs to the call before, and has arrived by now: the training has given the
        device another step since, and nobody is to wait for that.
        """
        device, writes = self.run.device, self._thread is not None and self._thread.is_alive()
        waiting = torch.full((1,), float(writes), device=device.torch_device)
        torch.distributed.all_reduce(waiting, op=torch.distributed.ReduceOp.MAX)
        earlier, self._asked = self._asked, device.read_later(waiting)
        read = earlier if device.reads_wait else self._asked
        return read is not None and not read()[0]

    def hold_update(self) -> None:
        """Let the update of the weights, which is launched next, begin once the weights are copied. The call does not
        wait."""
        self._copies.hold()

    def join(self) -> None:
        """Wait for this rank's shards. Not collective."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> Path:
        """Wait for the shards, and give the checkpoint its name."""
        self.join()
        torch.distributed.barrier()
        with self._failures():
            files = _gather_files(self.folder, self._files)
            self._finalize()
            _on_first_rank(self.run, self.folder, lambda: self._publish_written(files))
        remove_expired(self.run, self.folder, self.iteration)
        return iteration_folder(self.folder, self.iteration)

    def _finalize(self) -> None:
        """Let the engine end the save. What fails on the first rank, which writes the last files alone, waits for
        `_publish_written`, which all ranks hear of."""
        assert self._request is not None
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except OSError as error:  # of the engine's last file; the others wait until it exists
            torch.distributed.barrier()
            self._kept.strategy.failure = error

    def _publish_written(self, shards: checkpoint_manifest.Files) -> None:
        if self._kept.strategy.failure is not None:
            raise self._kept.strategy.failure
        self._publish(shards)

    def _begin(self) -> None:
        """Make the folder, if it is known that the disk has room."""
        try:
            hold_again(self.folder)
        except TrainingError as error:
            raise OSError(errno.EBUSY, str(error).rstrip("."), str(self.folder)) from error
        make_partial(self.folder, self.iteration)
        if self._kept.size is not None:
            check_space(Path(self.folder), self._kept.size)

    def _prepare(self, snapshot: checkpoint_state_dict.RunSnapshot, background: bool) -> None:
        """Make the engine's plan for a first save, or take it up for one that the training waits for. Collective."""
        state_dict = checkpoint_state_dict.to_save(snapshot, self._kept.exchange if background else IN_PLACE)
        is_first = self._kept.size is None
        if is_first:
            size = _sum_over_ranks(checkpoint_state_dict.size(state_dict), self.run.device)
            _on_first_rank(self.run, self.folder, lambda: check_space(Path(self.folder), size))
            self._kept.size = size
        self._request = self._planned(state_dict, validate=is_first)

    def _planned(self, state_dict: ShardedStateDict, *, validate: bool) -> AsyncRequest:
        """Return the engine's plan. It looks into the folder, which somebody may have removed, on the first rank alone,
        before it exchanges anything: the others would wait for that rank."""
        while True:
            try:
                return _request(state_dict, self._partial, self._kept.strategy, validate=validate)
            except FileNotFoundError:
                self._partial.mkdir(parents=True, exist_ok=True)

    def _write_aside(self, snapshot: checkpoint_state_dict.RunSnapshot | None) -> None:
        """Run `_write` in a thread of its own. The engine's writer synchronizes the thread's device."""
        self.run.device.bind_thread()
        self._write(snapshot)

    def _write(self, snapshot: checkpoint_state_dict.RunSnapshot | None) -> None:
        """Write this rank's shards. Failures wait for `finish`.

        Args:
            snapshot: state to write, where it is not planned yet.
        """
        try:
            self._copies.wait()
            if snapshot is not None:
                state_dict = checkpoint_state_dict.to_save(snapshot, self._kept.exchange)
                self._request = self._planned(state_dict, validate=False)
            assert self._request is not None
            written = written_checksums.watch(self._request)
            write_shards(self._request, _on_host(self._request))
            self._files = written.files()
            if self.run.rank == 0:
                with naming(self._partial):
                    self._write_companions()
        except OSError as error:
            self._files = _text(error)
        except Exception as error:
            self._files = f"{type(error).__name__}: {error}"

    def _write_companions(self) -> None:
        """Write the files that rank 0 adds to the shards."""
        (self._partial / CONFIG).write_text(to_yaml(self.run.config), encoding="utf-8")
        if self.run.data_record is not None:
            (self._partial / DATA).write_text(json.dumps(self.run.data_record, indent=1) + "\n", encoding="utf-8")
        earlier = (iteration_folder(self.folder, step) for step in reversed(saved_iterations(self.folder)))
        keep_tokenizer(self.run.config.data, self._partial, earlier)
        write_versions(self._partial)

    def _publish(self, shards: checkpoint_manifest.Files) -> None:
        """Write the manifest; then the checkpoint gets its name."""
        others = [path for path in checkpoint_manifest.all_files(self._partial) if path.suffix != ".distcp"]
        with naming(self._partial):
            checkpoint_manifest.write(self._partial, shards | checkpoint_manifest.describe(self._partial, others))
        publish(self.folder, self.iteration)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn whatever fails inside into a SaveFailedError where all ranks hear of it, and into a plain StorageError
        where one alone does; leave no partial folder. Collective."""
        try:
            yield
        except (CheckpointException, StorageError) as error:
            reason = ""
            if isinstance(error, CheckpointException):
                # The engine tells every rank of a failure, but only the first rank its reason.
                reason = "; ".join(str(failure[0]) for failure in error.failures.values())
            is_gone = [self.run.rank == 0 and self._is_gone(reason or str(error))]
            torch.distributed.broadcast_object_list(is_gone, src=0)
            shutil.rmtree(self._partial, ignore_errors=True)
            if is_gone[0]:
                raise FolderRemovedError(
                    f"--save {self.folder} was removed while the checkpoint of iteration {self.iteration} was being "
                    "written: it is no checkpoint, and earlier ones there may be gone. Give a folder that stays, and "
                    "look for who empties this one."
                ) from error
            if isinstance(error, StorageError):
                raise
            raise SaveFailedError(_message(self.folder, reason or "writing failed; rank 0 says why")) from error
        except OSError as error:  # of one rank alone
            shutil.rmtree(self._partial, ignore_errors=True)
            raise StorageError(_message(self.folder, _text(error))) from error

    def _is_gone(self, reason: str) -> bool:
        """Return whether the save failed because somebody removes the folder, or has removed it."""
        return not self._partial.is_dir() or is_lost(self.folder) or os.strerror(errno.ENOENT) in reason


def write_shards(request: AsyncRequest, buckets: Any) -> None:
    """Write this rank's files with the engine's writer, here and now, one after another.

    The engine's own loop over them replaces the error of a file by its type, and logs the rest.

    Raises:
        OSError: a file cannot be written; the error names it.
    """
    if request.async_fn is None:  # this rank writes nothing
        return
    transforms: Any = request.async_fn.args[0]  # pyright: ignore[reportFunctionMemberAccess]
    written = {}
    with written_checksums.without_checksums_of_torch():
        for index, bucket in enumerate(buckets):
            answer: Any = FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, None, None, use_fsync=True
            )
            _, ended = answer
            if isinstance(ended, Exception):
                with naming(bucket[0]):
                    raise ended
            written[index] = ended
    arguments: Any = request.async_fn_args
    arguments[-1].put(written)


def _request(
    state_dict: ShardedStateDict, folder: Path, strategy: TorchDistSaveShardedStrategy, *, validate: bool
) -> AsyncRequest:
    """Return megatron-core's request of the save: which rank writes which part, and how the save ends. Collective,
    where it is to be validated.

    Args:
        validate: whether all ranks together have every part of every tensor once.
    """
    # The results of a write in this process need not cross a process boundary; the engine's own queue would start a
    # process for it, which takes seconds.
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
    state_dict_utils.determine_global_metadata = _metadata_on_first_rank
    request = dist_checkpointing.save(
        state_dict,
        str(folder),
        strategy,
        validate_access_integrity=validate,
        content_metadata=dict(checkpoint_state_dict.CONTENT_METADATA),
        async_sharded_save=True,
        async_strategy="mcore",
    )
    assert request is not None
    return request


def _on_host(request: AsyncRequest) -> Any:
    """Return the engine's (file, key, (objects, tensors)) with all tensors in host memory."""
    return None if request.preload_fn is None else request.preload_fn()  # None: this rank writes nothing


def _sum_over_ranks(number: int, device: Device) -> int:
    total = torch.tensor(number, dtype=torch.int64).to(device.torch_device)
    torch.distributed.all_reduce(total)
    return int(total)


def _gather_files(folder: str | Path, own: checkpoint_manifest.Files | str) -> checkpoint_manifest.Files:
    """Return the files of all ranks on rank 0, and none on the others; where one failed, every rank raises."""
    answers = _gathered_by_first_rank(own)
    problem = [next((answer for answer in answers if isinstance(answer, str)), None)]
    torch.distributed.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise SaveFailedError(_message(folder, problem[0]))
    return {name: entry for answer in answers for name, entry in answer.items()}


def _gathered_by_first_rank(own: Any) -> list[Any]:
    """Return the objects of all ranks on rank 0; on the others, to which they are not sent, an empty list.
    Collective."""
    is_first = torch.distributed.get_rank() == 0
    gathered: list[Any] = [None] * torch.distributed.get_world_size() if is_first else []
    torch.distributed.gather_object(own, gathered if is_first else None, dst=0)
    return gathered


def _metadata_on_first_rank(sharded_state_dict: ShardedStateDict, process_group: Any = None) -> tuple[list, list]:
    """Return this rank's entries to save, without values, and on rank 0 the entries of all ranks.

    megatron-core's function sends the entries of all ranks to all: tens of megabytes with a thousand ranks, which only
    rank 0 uses.
    """
    assert process_group is None
    own = [value.without_data() for value in nested_values(sharded_state_dict)]
    return own, _gathered_by_first_rank(own)


def _text(error: OSError) -> str:
    """Return the reason and the file of the error, as far as it has them."""
    return ": ".join(str(part) for part in (error.strerror or str(error), error.filename) if part)


def _on_first_rank(run: Saveable, folder: str | Path, action: Callable[[], object]) -> None:
    """Call `action` on rank 0 while all wait; where it fails, every rank raises."""
    problem: list[str | None] = [None]
    if run.rank == 0:
        try:
            action()
        except OSError as error:
            problem = [_text(error)]
    torch.distributed.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise SaveFailedError(_message(folder, problem[0]))


def _message(folder: str | Path, reason: str) -> str:
    earlier: list[int] = []
    with suppress(OSError):
        earlier = saved_iterations(folder)
    whole, resume = ("Earlier checkpoints there are whole. ", "resume with --load") if earlier else ("", "start again")
    return (
        f"cannot save a checkpoint to {folder}: {reason}. {whole}Free space or fix the permission, or give another "
        f"folder with --save, and {resume}."
    )
