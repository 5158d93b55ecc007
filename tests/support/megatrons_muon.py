"""Muon of the package that Megatron-LM takes it from, as an optimizer of a user's own, which needs whole matrices."""

import dataclasses
import importlib
from typing import Any

from megatron_ext.config.derived.optimizers import OPTIMIZERS

# It may be missing, or untyped.
Muon: Any = importlib.import_module("emerging_optimizers.orthogonalized_optimizers").Muon


class Reference(Muon):
    """Muon whose fused projections are one matrix."""

    def __init__(self, params: Any):
        super().__init__(params, momentum=0.9, nesterov=True, extra_scale_factor=0.2, fp32_matmul_prec="highest")


REFERENCE = dataclasses.replace(
    OPTIMIZERS["muon"],
    name="megatrons-muon",
    torch_class=f"{__name__}:Reference",
    arguments={},
    puts_matrices_together=False,
)
