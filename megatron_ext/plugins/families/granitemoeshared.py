"""Granite 3, experts and a shared one: granitemoe with `shared_intermediate_size`."""

from dataclasses import replace

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.granite import GRANITES
from megatron_ext.plugins.families.granitemoe import GRANITEMOE

_WIDTH = "shared_intermediate_size"
_OURS = "moe_shared_expert_intermediate_size"
SHARED_EXPERT: shared.Keys = (
    lambda reading: {_OURS: reading.integer(_WIDTH, 0, least=0) or None},
    lambda config: {_WIDTH: config.model.moe_shared_expert_intermediate_size or 0},
)
"""The key of the width of a shared expert."""

SHARED_EXPERT_NAMES = {
    f"mlp.shared_experts.linear_fc{number}": (f"shared_mlp.{name}_linear",)
    for number, name in enumerate(("input", "output"), 1)
}

_READ, _WRITE = shared.keys(shared.decoder(biases="attention"), GRANITES, shared.LOCAL_EXPERTS, SHARED_EXPERT)
GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    names={**GRANITEMOE.names, **SHARED_EXPERT_NAMES},
    read=_READ,
    write=_WRITE,
    is_seldom=True,
)
