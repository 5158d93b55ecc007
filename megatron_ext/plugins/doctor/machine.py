"""Checks the machine: ranks against cores, shared memory, limits of the system, room for checkpoints; its GPUs: whether
torch can use them, whether there are enough, how they are connected, and settings that follow."""

import os
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.config.derived.batch_size import training_steps
from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.cost.state_bytes import optimizer_bytes
from megatron_ext.device import hardware_queues
from megatron_ext.device.gpu_inventory import Survey, obstacle, survey
from megatron_ext.errors import StorageError
from megatron_ext.parts.catalogue import count
from megatron_ext.plugins.doctor.finding import Finding, Launch, error, ok, warning

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
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    where = f"--save {launch.config.checkpoint.save}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield error(
            f"{where}: {existing} cannot be written",
            "the run ends at its first checkpoint",
            f"give a folder of yours, or chown {existing}",
            StorageError.exit_code,
        )
        return
    free, one = shutil.disk_usage(existing).free, checkpoint_bytes(launch.config)
    kept = _checkpoints_at_once(launch.config)
    text = f"{where}: {_size(free)} free, a checkpoint is about {_size(one)}"
    if free < one:
        yield error(text, "not one fits", "free space, or save elsewhere", StorageError.exit_code)
    elif free < kept * one:
        all_stay = launch.config.checkpoint.keep_last_checkpoints is None
        why = "all are kept" if all_stay else "the new one is whole before an old one is removed"
        yield warning(
            text,
            f"{kept} must fit: {why}",
            "free space, or save elsewhere; --keep-last-checkpoints 1 keeps the fewest",
        )
    else:
        yield ok(text)


def _checkpoints_at_once(config: Config) -> int:
    """Return how many checkpoints of the run --save holds at most at one time."""
    flags, steps = config.checkpoint, training_steps(config)
    saved = 1 if flags.save_interval is None else -(-steps // flags.save_interval)
    if flags.keep_last_checkpoints is None:
        return saved
    retained = 0 if flags.save_retain_interval is None else steps // flags.save_retain_interval
    return min(saved, flags.keep_last_checkpoints + 1 + retained)


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


def gpus_work(launch: Launch) -> Iterator[Finding]:
    """Check the GPUs of this machine."""
    surveyed = survey()
    if surveyed is None:
        yield ok("no NVIDIA driver: the run takes CPU processes")
    else:
        yield from judge(launch, surveyed)


def judge(launch: Launch, surveyed: Survey) -> Iterator[Finding]:
    """Yield the findings on these GPUs for this launch."""
    found = obstacle(surveyed, launch.environment.get("CUDA_VISIBLE_DEVICES"))
    if found:
        yield error(found.what, found.why, f"{found.fix}; --device cpu trains on CPU processes")
        return
    kinds = Counter(gpu.name for gpu in surveyed.gpus)
    yield ok(
        f"{', '.join(f'{n} x {name}' for name, n in kinds.items())}; driver {surveyed.driver}, CUDA {surveyed.cuda}, "
        f"NCCL {surveyed.nccl or 'missing'}"
    )
    if surveyed.nccl is None and launch.world_size > 1:
        yield error(f"torch {surveyed.torch} is built without NCCL", "GPUs cannot talk", "pip install torch for Linux")
    if launch.ranks > len(surveyed.gpus):
        yield error(
            f"{launch.ranks} ranks on this machine, but {len(surveyed.gpus)} GPUs",
            "each rank takes a GPU of its own",
            f"torchrun --nproc-per-node {len(surveyed.gpus)}",
        )
    if len(kinds) > 1:
        yield warning("the GPUs are of different kinds", "all wait for the slowest", "choose by CUDA_VISIBLE_DEVICES")
    yield from _occupied(surveyed)
    yield from _hardware_queues(launch, surveyed)
    yield from _connections(launch, surveyed)


def _occupied(surveyed: Survey) -> Iterator[Finding]:
    for gpu in surveyed.gpus:
        if gpu.free < 0.9 * gpu.total:
            yield warning(
                f"GPU {gpu.index}: only {gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB are free",
                "another process holds memory there, often what is left of an earlier run",
                "end what `nvidia-smi` lists there",
            )


def _hardware_queues(launch: Launch, surveyed: Survey) -> Iterator[Finding]:
    setting = launch.environment.get(hardware_queues.VARIABLE)
    # Without flags, a layout that could suffer.
    layout = launch.config.layout if launch.config else LayoutConfig(tensor_model_parallel_size=2)
    wrong = hardware_queues.mistake(layout, min(gpu.capability[0] for gpu in surveyed.gpus), setting)
    if wrong:
        yield warning(f"{hardware_queues.VARIABLE}={setting}", *wrong)


def _connections(launch: Launch, surveyed: Survey) -> Iterator[Finding]:
    if not surveyed.links:
        return
    kinds = Counter("NVLink" if kind.startswith("NV") else kind for kind in surveyed.links.values())
    yield ok(f"pairs of GPUs: {', '.join(f'{n} by {kind}' for kind, n in kinds.items())}")
    without = sum(n for kind, n in kinds.items() if kind != "NVLink")
    if without and launch.environment.get("NCCL_P2P_LEVEL", "").upper() == "NVL":
        yield warning(
            f"NCCL_P2P_LEVEL=NVL, but {without} of {len(surveyed.links)} pairs of GPUs have no NVLink",
            "between those it turns direct access off: data go through the machine's memory",
            "unset NCCL_P2P_LEVEL",
        )
    size = launch.config.layout.tensor_model_parallel_size if launch.config else 1
    far = [pair for pair, kind in surveyed.links.items() if kind == "SYS" and pair[0] // size == pair[1] // size]
    if size > 1 and far:
        yield warning(
            f"tensor-parallel ranks on GPUs {far[0][0]} and {far[0][1]} talk across the processors (SYS)",
            "tensor parallelism sends at every layer",
            "reorder CUDA_VISIBLE_DEVICES, or use a smaller --tensor-model-parallel-size",
        )
