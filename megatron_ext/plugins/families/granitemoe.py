"""Granite 3, experts: granite's factors; the matrices of a layer's experts are one tensor."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.granite import GRANITES

_OF_EXPERTS = {
    "mlp.router": ("block_sparse_moe.router.layer",),
    "mlp.experts.linear_fc1": ("block_sparse_moe.input_linear",),
    "mlp.experts.linear_fc2": ("block_sparse_moe.output_linear",),
}


GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    {**shared.DECODER_NAMES, **_OF_EXPERTS},
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_router_pre_softmax": False},
    *shared.keys(shared.decoder(biases="attention"), GRANITES, shared.LOCAL_EXPERTS),
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    dependent_flags=shared.biases_of_attention,
)
