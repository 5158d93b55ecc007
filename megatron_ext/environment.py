"""Reads the variables by which a launcher tells a process which rank it is.

torchrun's are RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; DeepSpeed's has LOCAL_SIZE for the last. Without them,
the variables of mpirun and srun are read: a process of theirs that took itself for the only one would train alone.
"""

import os
import re
from collections.abc import Mapping, MutableMapping

from megatron_ext.errors import ConfigurationError

_LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
_LEAST |= {"TORCHELASTIC_RESTART_COUNT": 0}
_MOST = 1 << 20


_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Rank, size, local rank and local size of Open MPI, of Intel MPI and MPICH, of MVAPICH, and of a job step of Slurm."""

_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PORT = "29500"  # torchrun's own


def take_ranks_of_mpi(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables from mpirun's or srun's, where RANK is not set and they started several processes.

    MASTER_ADDR has to say where rank 0 is, unless all are on one machine; `check_launch` names it where it is missing.
    A job script of Slurm that starts no step is one process: only srun sets SLURM_STEP_NUM_TASKS.
    """
    if "RANK" in environment:
        if environment.get("LOCAL_SIZE"):  # DeepSpeed's launcher's name of it
            environment.setdefault("LOCAL_WORLD_SIZE", environment["LOCAL_SIZE"])
        return
    for names in _MPI:
        rank, size, local, here = (environment.get(name, "") for name in names)
        here = _of_node(here, environment.get("SLURM_NODEID", "0"))
        if not rank or (_integer(size) or 1) == 1:
            continue
        if here == size:
            environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", _PORT)
        values = zip(_OURS, (rank, size, local, here), strict=True)
        environment.update({name: value for name, value in values if value})
        return


def _of_node(text: str, node: str) -> str:
    """Return the number of a node's processes: `8(x2),4` are 8 on each of the first two nodes, and 4 on the third."""
    counts = [
        count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(min(int(times or 1), _MOST))
    ]
    number = _integer(node)
    return counts[number] if number is not None and 0 <= number < len(counts) else ""


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Check the variables that say which rank this is.

    Raises:
        ConfigurationError: one is no integer, out of range, or not set where others are; with every such problem.
    """
    problems = []
    ranks: dict[str, int] = {}
    for name, least in _LEAST.items():
        text = environment.get(name, "")
        if not text and name not in environment:
            continue
        value = _integer(text)
        if value is None or not least <= value <= _MOST:
            problems.append(
                f"${name} is {text[:100]!r}, not an integer from {least}; start ranks with torchrun, which sets it, "
                f"or unset {name} to run one process"
            )
        else:
            ranks[name] = value
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in ranks and size in ranks and ranks[rank] >= ranks[size]:
            problems.append(
                f"${rank} is {ranks[rank]}, but ${size} is {ranks[size]}: ranks count from 0; set both as torchrun does"
            )
    by_mpi = next((names[0] for names in _MPI if environment.get(names[0])), None)
    if by_mpi and ranks.get("RANK", -1) >= 0 and ranks.get("WORLD_SIZE", 1) > 1 and "MASTER_ADDR" not in environment:
        problems.append(
            f"${by_mpi} says that this is rank {ranks['RANK']} of {ranks['WORLD_SIZE']}, but $MASTER_ADDR is not set; "
            "export MASTER_ADDR=<name of rank 0's machine>, which mpirun passes on with -x MASTER_ADDR"
        )
    if not problems and "WORLD_SIZE" not in environment and (asked := _asked_for_several(environment)):
        problems.append(
            f"{asked}, but $WORLD_SIZE is not set: this process would train alone; start the ranks with torchrun "
            "--nproc-per-node N, which sets it, or unset the variable to run one process"
        )
    if problems:
        raise ConfigurationError(problems)


def _asked_for_several(environment: Mapping[str, str]) -> str | None:
    """Return how a launcher's variables say that this is one of several processes; None where they do not."""
    for name in ("LOCAL_WORLD_SIZE", *(names[1] for names in _MPI)):
        if (_integer(environment.get(name, "")) or 1) > 1:
            return f"${name} is {environment[name]}"
    for name in ("RANK", "LOCAL_RANK"):
        if (_integer(environment.get(name, "")) or 0) > 0:
            return f"${name} is {environment[name]}"
    # Without its flags for several GPUs, Accelerate starts one process and sets this where it was asked for more.
    if "MASTER_ADDR" in environment and "ACCELERATE_MIXED_PRECISION" in environment:
        return f"accelerate launch was asked for several processes ($MASTER_ADDR is {environment['MASTER_ADDR']})"
    return None


def launch_warning(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning where mpirun or srun started more processes than a launcher within theirs has ranks: each of
    theirs is then a run of its own."""
    ranks = _integer(environment.get("WORLD_SIZE", "")) or 1
    for _, size, _, _ in _MPI:
        if (_integer(environment.get(size, "")) or 1) > ranks:
            return (
                f"${size} is {environment[size]}, but this run has {ranks} rank{'s' if ranks > 1 else ''} "
                "($WORLD_SIZE): each process of the outer launcher trains by itself; for one run of all give torchrun "
                "--nnodes and --rdzv-endpoint, or leave torchrun out"
            )
    return None


def rank() -> int:
    """Return this process's rank; 0 without a launcher, or where `check_launch` will report a problem."""
    return max(_integer(os.environ.get("RANK", "")) or 0, 0)


def world_size() -> int:
    """Return the number of ranks; 1 without a launcher."""
    return max(_integer(os.environ.get("WORLD_SIZE", "")) or 1, 1)


def local_rank() -> int:
    """Return this process's rank among the ranks of its machine; 0 without a launcher."""
    return max(_integer(os.environ.get("LOCAL_RANK", "")) or 0, 0)


def local_world_size() -> int:
    """Return the number of ranks on this machine; where the launcher does not say, at least this one's count."""
    return max(_integer(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1, local_rank() + 1)


def attempt() -> int:
    """Return how many times torchrun has started the ranks of this launch again; 0 without it."""
    return max(_integer(os.environ.get("TORCHELASTIC_RESTART_COUNT", "")) or 0, 0)


def attempts_left() -> int:
    """Return how many times torchrun will start the ranks of this launch again; 0 without it."""
    return max((_integer(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")) or 0) - attempt(), 0)


def _integer(text: str) -> int | None:
    try:
        return int(text) if len(text) <= 20 else None
    except ValueError:
        return None
