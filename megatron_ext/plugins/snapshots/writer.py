"""Takes snapshots: the training stops for the copy into host memory, a thread writes it.

A snapshot holds everything that a rank's next step follows from, as plain tensors and numbers.

Unlike a checkpoint, it is not cut, gathered or named for another layout: the same rank of the same layout reads it,
which has tensors of the same names and shapes.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megatron_ext import environment
from megatron_ext.checkpoint.native import checkpoint_manifest, checkpoint_state_dict, optimizer_state
from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG, DATA, iteration_folder, saved_iterations
from megatron_ext.checkpoint.native.snapshot import HostMemory, Saveable
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.schema import flags_of
from megatron_ext.errors import DataError
from megatron_ext.plugins.snapshots import rank_file
from megatron_ext.plugins.snapshots.flags import SnapshotFlags
from megatron_ext.plugins.snapshots.newest_snapshot import contents_of
from megatron_ext.plugins.snapshots.snapshot_folder import (
    exchange,
    file_of,
    folder_of,
    layout_of,
    remove_all,
    remove_later,
    remove_old,
)


class SnapshotWriter:
    """Takes the snapshots of a run, one at a time. To make one is collective.

    A snapshot that cannot be written is none, and the training goes on: `problem` says why, and none is taken any more
    on this rank.
    """

    def __init__(self, run: Saveable):
        folder = folder_of(run.config)
        assert folder is not None
        self.run, self.folder = run, folder
        self.problem: str | None = None
        self.bytes = 0
        """Bytes of this rank's last snapshot."""
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._jump = self._peer_distance()
        self._group: Any = None
        self._contents = contents_of(run.config)
        self._follows: tuple[int, str | None] = 0, None  # the checkpoint before, and its manifest's name

    def take(self) -> float:
        """Take a snapshot of the run as it is; return the seconds for which the training stopped. The first call is
        collective where there are copies."""
        self.join()
        if self._jump and self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        if self.problem is not None and not self._jump:
            return 0.0
        began = time.perf_counter()
        run = self.run
        copies = run.device.copies()
        with run.gathered_parameters():
            tensors = {name: self._memory.copy(copies, name, one) for name, one in tensors_of(run).items()}
        tensors |= random_states(run)
        numbers = numbers_of(run)
        copies.wait()
        stopped = time.perf_counter() - began
        arguments = (run.state.iteration, tensors, numbers)
        self._thread = threading.Thread(target=self._write, args=arguments, name="snapshot", daemon=True)
        self._thread.start()
        return stopped

    def join(self, seconds: float | None = None) -> None:
        """Wait for the snapshot that is being written."""
        if self._thread is not None:
            self._thread.join(seconds)

    def forget(self) -> None:
        """Remove the snapshots of the run, which is saved."""
        self.join()
        torch.distributed.barrier()
        remove_all(self.folder)

    def remove_later(self) -> None:
        """Remove snapshots that other courses of the run have left, before the training."""
        remove_later(self.folder, self.run.state.iteration)

    def _write(self, iteration: int, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        self.run.device.bind_thread()
        rank = self.run.rank
        path = file_of(self.folder, iteration, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._check_space(path.parent, tensors)
            self.bytes = rank_file.write(path, self._facts(iteration, numbers), tensors)
            remove_old(self.folder, iteration)
        except OSError as error:
            self.problem = f"{error.strerror}: {error.filename or path}"
        if self._jump:
            self._copy_to_peer(iteration, path)

    def _copy_to_peer(self, iteration: int, path: Path) -> None:
        size = torch.distributed.get_world_size()
        to, origin = (self.run.rank + self._jump) % size, (self.run.rank - self._jump) % size
        target = file_of(self.folder, iteration, origin, copy=True)
        try:
            self.problem = exchange(path, to, target, origin, self._group) or self.problem
        except (OSError, RuntimeError) as error:
            self.problem = f"the copy in another machine failed: {error}"

    def _check_space(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(folder).free
        if size > free:
            raise OSError(28, f"{size:,} bytes are needed for a rank, {free:,} are free", str(folder))

    def _facts(self, iteration: int, numbers: dict[str, Any]) -> dict[str, Any]:
        run = self.run
        save = run.config.checkpoint.save or ""
        record = run.data_record
        checkpoint = max((step for step in saved_iterations(save) if step <= iteration), default=0)
        if checkpoint != self._follows[0]:
            self._follows = checkpoint, checkpoint_manifest.name_of(iteration_folder(save, checkpoint))
        return {
            "iteration": iteration,
            "layout": layout_of(run.config),
            "contents": self._contents,
            "checkpoint": checkpoint,
            "manifest": self._follows[1],
            "numbers": numbers,
            CONFIG: to_yaml(run.config),
            DATA: None if record is None else json.dumps(record),
        }

    def _peer_distance(self) -> int:
        """Return the distance in ranks to the rank that gets the copy; 0 where there is no copy."""
        flags = flags_of(self.run.config.checkpoint, SnapshotFlags)
        size = torch.distributed.get_world_size()
        return (flags.replication_jump or environment.local_world_size()) % size if flags.replication else 0


def restore_snapshot(run: Saveable, iteration: int) -> int:
    """Put the snapshot, which all ranks have agreed on, into `run`; return the iteration of its state.

    Raises:
        DataError: it is of another run.
    """
    folder = folder_of(run.config)
    assert folder is not None
    path = file_of(folder, iteration, run.rank)
    header = rank_file.read_header(path) or {}
    random = random_states(run)
    with run.gathered_parameters():
        rank_file.restore(path, tensors_of(run) | random)
    try:
        set_numbers(run, header["numbers"])
    except (KeyError, TypeError) as error:
        raise DataError(f"the snapshot {path} lacks {error}; remove the folder to go on from the checkpoint") from error
    set_random_states(run, random)
    return run.state.iteration


def tensors_of(run: Saveable) -> dict[str, torch.Tensor]:
    """Return the tensors themselves, by names that are the same in every process of this layout. Each byte once.

    Call it where all parameters are up to date. A weight whose memory megatron-core's FSDP has freed after use (ZeRO-3)
    is left out; it follows from the rows, which the buffers hold.
    """
    tensors = {name: tensor.detach() for name, tensor in _all(run) if tensor.numel() and _has_memory(tensor)}
    largest_first = sorted(tensors, key=lambda name: -tensors[name].numel() * tensors[name].element_size())
    kept: dict[int, list[tuple[int, int]]] = {}
    chosen = set()
    for name in largest_first:
        tensor = tensors[name]
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        ranges = kept.setdefault(tensor.untyped_storage().data_ptr(), [])
        if not any(first <= begin and end <= last for first, last in ranges):
            chosen.add(name)
            if tensor.is_contiguous():
                ranges.append((begin, end))
    return {name: tensor for name, tensor in tensors.items() if name in chosen}


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def numbers_of(run: Saveable) -> dict[str, Any]:
    """Return the rest of the run's state, as plain data whose floats read back to the same doubles."""
    return {
        "state": asdict(run.state),
        "optimizer_step": optimizer_state.step_count(checkpoint_state_dict.optimizer_parts(run)),
        "optimizer_numbers": optimizer_state.numbers(checkpoint_state_dict.optimizer_parts(run), run.config.optimizer),
        "grad_scaler": checkpoint_state_dict.grad_scaler_state(run),
    }


def random_states(run: Saveable) -> dict[str, torch.Tensor]:
    """Return the states of the random generators."""
    states = {
        f"rng.{name}": state.clone() for name, state in checkpoint_state_dict.random_tracker().get_states().items()
    }
    return {"rng": run.device.rng_state(), **states}


def set_numbers(run: Saveable, numbers: dict[str, Any]) -> None:
    """Restore the numbers that `numbers_of` returned, when the tensors have been restored."""
    for field in fields(run.state):
        setattr(run.state, field.name, numbers["state"][field.name])
    parts = checkpoint_state_dict.optimizer_parts(run)
    for part in parts:
        part.updater.refresh()
    optimizer_state.set_step_count(parts, run.config.optimizer, numbers["optimizer_step"])
    optimizer_state.set_numbers(parts, run.config.optimizer, numbers.get("optimizer_numbers", {}))
    checkpoint_state_dict.set_grad_scaler(run, numbers["grad_scaler"])


def set_random_states(run: Saveable, states: dict[str, torch.Tensor]) -> None:
    """Restore the states that `random_states` returned."""
    run.device.set_rng_state(states["rng"])
    names = checkpoint_state_dict.random_tracker().get_states()
    checkpoint_state_dict.random_tracker().set_states({name: states[f"rng.{name}"] for name in names})


def _all(run: Saveable) -> Iterator[tuple[str, torch.Tensor]]:
    for number, chunk in enumerate(run.chunks):
        for index, tensor in enumerate(run.sharding.held_weights(chunk)):
            if tensor is not None:
                yield f"weights.{number}.{index}", tensor
        for name, buffer in chunk.named_buffers():
            yield f"buffers.{number}.{name}", buffer
    for number, part in enumerate(checkpoint_state_dict.optimizer_parts(run)):
        optimizer_state.initialize_state(part, run.config.optimizer)
        for index, (_, state) in enumerate(optimizer_state.own_state(part, run.config.optimizer)):
            for name, tensor in state.items():
                yield f"optimizer.{number}.{index}.{name}", optimizer_state.once(tensor)
        for index, (_, main) in enumerate(part.main_parameters()):
            yield f"optimizer.{number}.{index}.main", part.updater.master_of(main)
