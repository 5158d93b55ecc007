"""dots.llm1: Qwen3 with DeepSeek-V3's experts."""

from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import BIASED_SIGMOID, MIXTURE_NAMES, Mixture

_MIXTURE = Mixture(BIASED_SIGMOID, group_scores=2, normalized=True)


DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    MIXTURE_NAMES,
    {**shared.DECODER_FLAGS, "qk_layernorm": True},
    *shared.keys(shared.decoder(biases="attention"), _MIXTURE.keys, shared.typed(shared.later_layers)),
    {"norm_topk_prob": False, "sliding_window": 4096, "max_window_layers": 62, "max_position_embeddings": 2048},
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=lambda model: {**shared.biases_of_attention(model), **_MIXTURE.dependent_flags(model)},
)
