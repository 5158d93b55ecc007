"""dots.llm1: deepseek_v3's experts in qwen3's layers; here and in the other families with deepseek_v3's experts
`norm_topk_prob` false, the default of this class, is `--moe-router-unnormalized`."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import MIXTURE_NAMES, V3_MIXTURE

DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    MIXTURE_NAMES,
    {**shared.DECODER_FLAGS, "qk_layernorm": True},
    *shared.keys(shared.decoder(biases="attention"), V3_MIXTURE.keys, shared.typed(shared.later_layers)),
    {"norm_topk_prob": False, "sliding_window": 4096, "max_window_layers": 62, "max_position_embeddings": 2048},
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=lambda model: {**shared.biases_of_attention(model), **V3_MIXTURE.dependent_flags(model)},
)
