"""K-EXAONE: exaone4's layers with norms before attention and MLP, deepseek_v3's experts."""

from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.exaone4 import EXAONE4, others_rotate_nothing, windows_that_rotate
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import MIXTURE_NAMES, V3_MIXTURE, typed_json, typed_mixtures
from megatron_ext.plugins.families.reading import Reading


def _mixtures(reading: Reading) -> dict[str, Any]:
    first = typed_mixtures(reading, reading.integer("first_k_dense_replace", 1, least=0))
    return V3_MIXTURE.values(reading, first)


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**others_rotate_nothing(model), **V3_MIXTURE.dependent_flags(model)}


EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    {**MIXTURE_NAMES, EXPERT_BIAS: ("mlp.e_score_correction_bias",)},
    {name: value for name, value in EXAONE4.flags.items() if name != "norm_position"},
    *shared.keys(
        shared.decoder(),
        (windows_that_rotate, shared.typed_window_json),
        (_mixtures, lambda config: {**V3_MIXTURE.json(config), **typed_json(config)}),
    ),
    {
        **EXAONE4.defaults,
        **{"num_experts": 64, "num_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1024},
        **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "max_position_embeddings": 2048},
    },
    renamed={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    dependent_flags=_dependent_flags,
    may_be_dense=True,
    is_seldom=True,
)
