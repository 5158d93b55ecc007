"""Chooses which of torch's two implementations of NCCL process groups serves `--distributed-backend nccl`.

Since version 2.15 the name "nccl" stands for ProcessGroupNCCL2 (pytorch/pytorch#192281): it binds the group of all
ranks to a GPU, makes every later group by splitting that group's communicator, in which all ranks take part, and has
one communicator and one stream for all of a group's operations. The older ProcessGroupNCCL, "nccl-legacy", makes
communicators when they are first used, and one for each pair of ranks that send to each other. The groups that
`parallel/groups.py` leaves out, and the overlap of interleaved pipelines, were reasoned about for the older one, which
is the default until a GPU has shown the other to be as good.

torch reads the variable when a group first asks for "nccl". This needs no torch before `in_use`.
"""

import os
from collections.abc import MutableMapping

VARIABLE = "TORCH_DIST_USE_NCCL2"
LEGACY = "nccl-legacy"
"""torch's name of ProcessGroupNCCL; ProcessGroupNCCL2 is named "nccl2"."""

_BY_CONSTRUCTOR = {"_create_nccl_process_group": LEGACY, "_create_nccl2_process_group": "nccl2"}


def choose(backend: str, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set the variable for an implementation; return a warning where the environment asked for the other.

    Args:
        backend: --nccl-backend: "nccl-legacy" or "nccl2".
        environment: the variables of the process.
    """
    before, wanted = environment.get(VARIABLE), "0" if backend == LEGACY else "1"
    environment[VARIABLE] = wanted
    if before is None or (before == "0") == (wanted == "0"):
        return None
    other = "nccl2" if backend == LEGACY else LEGACY
    return f"{VARIABLE}={before} is not followed: the run takes --nccl-backend {backend}; use --nccl-backend {other}"


def in_use() -> str:
    """Return which implementation torch has registered for "nccl". Without one, the next group registers it."""
    from torch.distributed.distributed_c10d import Backend

    register = getattr(Backend, "_ensure_backend_registered", None)
    if register is None:  # before torch 2.15, where "nccl" is ProcessGroupNCCL
        return LEGACY
    register("nccl")
    constructor = Backend._plugins["NCCL"].creator_fn.__name__
    return _BY_CONSTRUCTOR.get(constructor, constructor)
