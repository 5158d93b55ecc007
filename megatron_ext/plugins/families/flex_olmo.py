"""FlexOlmo: OLMo-2 with experts in all layers."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import WHOLE_MIXTURE

FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    {
        **shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        **shared.NAMES_WITH_NORMS_AFTER,
    },
    {
        **{**shared.DECODER_FLAGS, "norm_position": "after", "qk_layernorm": True, "qk_layernorm_over": "projection"},
        "disable_bias_linear": True,
    },
    *shared.keys(shared.decoder(biases="attention"), shared.WITHOUT_PADDING, WHOLE_MIXTURE),
    {"num_experts": 7, "num_experts_per_tok": 5, "rope_theta": 500000.0, "max_position_embeddings": 4096},
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=shared.biases_of_attention,
)
