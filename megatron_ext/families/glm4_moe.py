"""GLM-4.5 and 4.6: half of each head's channels are rotated, and DeepSeek-V3's experts after dense first layers."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import BIASED_SIGMOID, MIXTURE_NAMES, Mixture, ahead_json, ahead_values
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, NEXT_TOKEN_NAMES, decoder_json, decoder_values

_MIXTURE = Mixture(BIASED_SIGMOID, group_scores=2, normalized=True)


def _read(reading: Reading) -> dict[str, Any]:
    return {
        **decoder_values(reading, partial=True),
        **_MIXTURE.values(reading),
        **ahead_values(reading),
        "add_qkv_bias": reading.boolean("attention_bias", False),
        "qk_layernorm": reading.boolean("use_qk_norm", False),
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **decoder_json(config),
        **_MIXTURE.json(config),
        **ahead_json(config),
        "partial_rotary_factor": model.rotary_percent,
        "attention_bias": model.has_qkv_bias,
        "use_qk_norm": model.qk_layernorm,
    }


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    {**MIXTURE_NAMES, **NEXT_TOKEN_NAMES},
    {**DECODER_FLAGS, "disable_bias_linear": True},
    _read,
    _write,
    {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        **{"partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    },
    {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    dependent_flags=_MIXTURE.dependent_flags,
)
