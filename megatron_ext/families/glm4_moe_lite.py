"""GLM-4.7 Flash: DeepSeek-V3's attention and experts, with another epsilon in the norms of latents."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import latents, mixtures
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import NEXT_TOKEN_NAMES
from megatron_ext.parts.stack import layers

_MIXTURE = mixtures.Mixture(mixtures.BIASED_SIGMOID, group_scores=2, normalized=True)


def _read(reading: Reading) -> dict[str, Any]:
    first = mixtures.typed_mixtures(reading, 1)
    return {**latents.latent_values(reading), **_MIXTURE.values(reading, first), **mixtures.ahead_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    decoder = [layer for layer in layers(config) if layer.next_token is None]
    kinds = {"mlp_layer_types": [mixtures.MLP_KINDS[layer.experts is not None] for layer in decoder]}
    return {**latents.latent_json(config), **_MIXTURE.json(config), **kinds, **mixtures.ahead_json(config)}


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    {**mixtures.MIXTURE_NAMES, **latents.LATENT_NAMES, **NEXT_TOKEN_NAMES},
    latents.LATENT_FLAGS,
    _read,
    _write,
    {
        **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
        **{"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_routed_experts": 64, "n_shared_experts": 1},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
    },
    {"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"},
    dependent_flags=lambda model: {**latents.what_latents_can_say(model), **_MIXTURE.dependent_flags(model)},
    may_be_dense=True,
)
