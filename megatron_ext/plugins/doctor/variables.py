"""Checks environment variables with known mistakes: those that nobody reads, and those that cost speed or hide a
failure."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.plugins.doctor.finding import Finding, Launch, warning


@dataclass(frozen=True)
class Mistake:
    """A value of a variable that is not what its user hoped for. Empty `values` stand for any value."""

    name: str
    values: tuple[str, ...]
    why: str
    fix: str


MISTAKES = (
    Mistake(
        "NCCL_TIMEOUT",
        (),
        "neither NCCL nor torch reads it: a hang lasts as long as without it",
        "use --distributed-timeout-minutes N, and unset it",
    ),
    Mistake("TORCH_NCCL_TIMEOUT", (), "torch does not read it", "use --distributed-timeout-minutes N, and unset it"),
    Mistake(
        "NCCL_BLOCKING_WAIT",
        (),
        "torch calls it TORCH_NCCL_BLOCKING_WAIT; the timeout works without it",
        "unset NCCL_BLOCKING_WAIT; use --distributed-timeout-minutes N",
    ),
    Mistake(
        "TORCH_NCCL_BLOCKING_WAIT",
        ("1",),
        "every wait then blocks the host, so that nothing overlaps",
        "unset TORCH_NCCL_BLOCKING_WAIT; use --distributed-timeout-minutes N",
    ),
    Mistake(
        "NCCL_ASYNC_ERROR_HANDLING",
        (),
        "torch calls it TORCH_NCCL_ASYNC_ERROR_HANDLING, and it is on by default",
        "unset NCCL_ASYNC_ERROR_HANDLING",
    ),
    Mistake(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ("0",),
        "a rank that waits for a lost one then waits for ever, whatever the timeout",
        "unset TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    Mistake("NCCL_P2P_DISABLE", ("1",), "GPUs of one machine then talk through its memory", "unset NCCL_P2P_DISABLE"),
    Mistake(
        "NCCL_SHM_DISABLE", ("1",), "GPUs without a direct path then talk over the network", "unset NCCL_SHM_DISABLE"
    ),
    Mistake(
        "NCCL_DEBUG", ("TRACE",), "every call of NCCL is printed, which slows it", "export NCCL_DEBUG=WARN, or INFO"
    ),
    Mistake(
        "TORCH_DISTRIBUTED_DEBUG",
        ("DETAIL",),
        "every collective is compared between all ranks first, several times as slow",
        "unset TORCH_DISTRIBUTED_DEBUG, once the fault is found",
    ),
    Mistake("CUDA_LAUNCH_BLOCKING", ("1",), "the host waits for each kernel", "unset CUDA_LAUNCH_BLOCKING"),
)


def known_mistakes(launch: Launch) -> Iterator[Finding]:
    """Check the variables against the table."""
    for mistake in MISTAKES:
        value = launch.environment.get(mistake.name)
        if value is not None and (not mistake.values or value.upper() in mistake.values):
            yield warning(f"{mistake.name}={value}", mistake.why, mistake.fix)


def threads_fit_the_cores(launch: Launch) -> Iterator[Finding]:
    """Check the number of threads against the cores."""
    cores = len(os.sched_getaffinity(0))
    each = max(cores // launch.ranks, 1)
    value = launch.environment.get("OMP_NUM_THREADS")
    if launch.ranks == 1:
        return
    if value is None:
        if not launch.has_launcher:
            yield warning(
                f"OMP_NUM_THREADS is not set, for {launch.ranks} ranks on {cores} cores",
                "torchrun then gives every rank 1 thread, and any other launcher all of the cores",
                f"export OMP_NUM_THREADS={each}",
            )
    elif value.isdecimal() and int(value) * launch.ranks > max(cores, launch.ranks):
        yield warning(
            f"OMP_NUM_THREADS={value} x {launch.ranks} ranks is more than the {cores} cores",
            "threads that wait for a core make every rank slow",
            f"export OMP_NUM_THREADS={each}",
        )
