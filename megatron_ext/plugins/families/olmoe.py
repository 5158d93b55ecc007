"""OLMoE: qwen3_moe with norms of queries and keys over all heads of a token, `--qkv-clip` (`clip_qkv`)."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import WHOLE_MIXTURE

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    {
        **{**shared.DECODER_FLAGS, "qk_layernorm": True, "qk_layernorm_over": "projection"},
        "disable_bias_linear": True,
    },
    *shared.keys(shared.decoder(biases="attention"), shared.CLIPS, WHOLE_MIXTURE),
    {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=lambda model: {**shared.heads_fill_width(model), **shared.biases_of_attention(model)},
)
