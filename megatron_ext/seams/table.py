"""The table of the engine's seams: see the package."""

from megatron_ext.seams.megatron_core_seams import CHECKPOINTS, DATA, GROUPS, MODEL
from megatron_ext.seams.megatron_core_sharding_seams import DATA_PARALLEL, MEGATRON_FSDP, OPTIMIZERS
from megatron_ext.seams.seam import Seam
from megatron_ext.seams.torch_seams import COLLECTIVES, REHEARSAL, TORCH

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
"""All seams, by the part of the engine that they belong to. The test of the table finds where each is used."""
