"""Checks the machine: ranks against cores, shared memory, limits of the system, and room for checkpoints."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.config.schema import Config
from megatron_ext.doctor.finding import Finding, Launch, error, ok, warning
from megatron_ext.errors import StorageError
from megatron_ext.parts.catalogue import count
from megatron_ext.plan.state_bytes import optimizer_bytes

# Process groups of a rank, each of which may connect it with every other rank, at most; and what else is open.
_GROUPS = 12
_OTHER_FILES = 400
_SHARED_MEMORY = 1 << 30


def ranks_have_cores(launch: Launch) -> Iterator[Finding]:
    """Check that each rank has a core."""
    cores = len(os.sched_getaffinity(0))
    given = launch.environment.get("SLURM_CPUS_PER_TASK", "")
    if given.isdecimal() and cores < int(given):
        yield warning(
            f"{cores} cores for what this task of Slurm starts, of the {given} of --cpus-per-task",
            "srun does not take --cpus-per-task from sbatch (since Slurm 22.05), so that all ranks share few cores",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun",
        )
    if launch.ranks > cores:
        yield warning(
            f"{launch.ranks} ranks on {cores} cores",
            "every rank runs Python for itself: those that share a core take turns, and collectives wait for the last",
            f"start {cores} or fewer on this machine, unless it is a test",
        )
    else:
        yield ok(f"{launch.ranks} {'rank' if launch.ranks == 1 else 'ranks'} on {cores} cores")


def shared_memory_is_large_enough(launch: Launch, folder: str = "/dev/shm") -> Iterator[Finding]:
    """Check the size of shared memory."""
    if not Path(folder).is_dir():
        return
    size = shutil.disk_usage(folder).total
    if launch.ranks > 1 and size < _SHARED_MEMORY:
        yield warning(
            f"{folder} has {_size(size)}",
            "NCCL and worker processes exchange data there; containers get 64 MB, and fail with a bus error",
            "docker run --shm-size=16g, or --ipc=host; on Kubernetes an emptyDir of medium Memory there",
        )
    else:
        yield ok(f"{folder} has {_size(size)}")


def enough_files_may_be_open(launch: Launch) -> Iterator[Finding]:
    """Check the limit of open files against the connections of the ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _OTHER_FILES + _GROUPS * launch.world_size
    if soft < need:
        fix = f"ulimit -n {need}" if hard >= need else f"let the administrator raise the limit of {hard} (nofile)"
        yield warning(
            f"{soft} files may be open (ulimit -n), for {launch.world_size} ranks",
            f"each connection to a rank is one, in up to {_GROUPS} groups; then connections fail",
            fix,
        )
    else:
        yield ok(f"{soft} files may be open")


def pages_may_be_locked(launch: Launch) -> Iterator[Finding]:
    """Check the limit of locked memory: InfiniBand reads and writes memory that is locked in place."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = Path("/sys/class/infiniband")
    if soft != resource.RLIM_INFINITY and devices.is_dir() and any(devices.iterdir()) and launch.nodes > 1:
        yield warning(
            f"only {_size(soft)} of memory may be locked (ulimit -l)",
            "InfiniBand needs more, and NCCL fails with a memory registration error",
            "ulimit -l unlimited; in a container --ulimit memlock=-1",
        )


def checkpoints_have_room(launch: Launch) -> Iterator[Finding]:
    """Check that --save can be written, and has room for checkpoints."""
    if launch.config is None or launch.config.checkpoint.save is None:
        return
    path = Path(launch.config.checkpoint.save).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    where = f"--save {launch.config.checkpoint.save}"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield error(
            f"{where}: {there} cannot be written",
            "the run ends at its first checkpoint",
            f"give a folder of yours, or chown {there}",
            StorageError.exit_code,
        )
        return
    free, one = shutil.disk_usage(there).free, checkpoint_bytes(launch.config)
    kept = (launch.config.checkpoint.keep_last_checkpoints or 1) + 1  # the new one is whole before an old one goes
    text = f"{where}: {_size(free)} free, a checkpoint is about {_size(one)}"
    if free < one:
        yield error(text, "not one fits", "free space, or save elsewhere", StorageError.exit_code)
    elif free < kept * one:
        yield warning(
            text,
            f"{kept} must fit: the new one is whole before an old one is removed",
            "free space, or save elsewhere; --keep-last-checkpoints 1 keeps the fewest",
        )
    else:
        yield ok(text)


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint: a copy of the weights, and with the optimizer its states and fp32 weights."""
    each = config.training.params_bytes
    if not config.checkpoint.no_save_optim:
        each += optimizer_bytes(config) + 4 * config.training.mixed_precision
    return round(each * count(config))


def _size(amount: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount / 1e3:.1f} kB"


CHECKS = (
    ranks_have_cores,
    shared_memory_is_large_enough,
    enough_files_may_be_open,
    pages_may_be_locked,
    checkpoints_have_room,
)
