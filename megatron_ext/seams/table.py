"""The table of the engine's seams: see the package."""

from megatron_ext.seams.core import CHECKPOINTS, DATA, MODEL
from megatron_ext.seams.core_sharding import DATA_PARALLEL, MEGATRON_FSDP, OPTIMIZERS
from megatron_ext.seams.of_torch import COLLECTIVES, TORCH
from megatron_ext.seams.seam import Seam

SEAMS: tuple[Seam, ...] = (
    *MODEL,
    *DATA_PARALLEL,
    *MEGATRON_FSDP,
    *OPTIMIZERS,
    *CHECKPOINTS,
    *DATA,
    *TORCH,
    *COLLECTIVES,
)
"""All of them, by what they belong to. Where each is used, the test of the table finds out."""
