"""The table of the engine's seams: see the package."""

from megatron_ext.seams.core import CHECKPOINTS, DATA, GROUPS, MODEL
from megatron_ext.seams.core_sharding import DATA_PARALLEL, MEGATRON_FSDP, OPTIMIZERS
from megatron_ext.seams.of_torch import COLLECTIVES, REHEARSAL, TORCH
from megatron_ext.seams.seam import Seam

SEAMS: tuple[Seam, ...] = (
    *MODEL,
    *DATA_PARALLEL,
    *MEGATRON_FSDP,
    *OPTIMIZERS,
    *GROUPS,
    *CHECKPOINTS,
    *DATA,
    *TORCH,
    *COLLECTIVES,
    *REHEARSAL,
)
"""All of them, by what they belong to. Where each is used, the test of the table finds out."""
