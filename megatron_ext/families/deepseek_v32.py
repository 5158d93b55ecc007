"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the keys that an indexer chooses."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import latents
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import BIASED_SIGMOID, MIXTURE_NAMES, Mixture, ahead_json, ahead_values
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import NEXT_TOKEN_NAMES, layer_numbers

_MIXTURE = Mixture(BIASED_SIGMOID, group_scores=2, normalized=True)
_KINDS = ("dense", "sparse")
_EPSILON = 1e-6
"""Epsilon of the norm of the indexer's keys."""

_SIZES = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
_INDEXER = {
    "linear_wq_b": "wq_b",
    "linear_wk": "wk",
    "k_norm": "k_norm",
    "linear_weights_proj": "weights_proj",
}
INDEXED_NAMES: dict[str, tuple[str, ...]] = {
    **{**MIXTURE_NAMES, **latents.LATENT_NAMES, **NEXT_TOKEN_NAMES},
    **{
        f"self_attention.core_attention.indexer.{ours}": (f"self_attn.indexer.{theirs}",)
        for ours, theirs in _INDEXER.items()
    },
}
INDEXED_FLAGS = {**latents.LATENT_FLAGS, "experimental_attention_variant": "dsa"}
INDEXED_DEFAULTS: dict[str, Any] = {
    **{**latents.LATENT_DEFAULTS, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    **{"index_topk": 2048, "index_head_dim": 128},
}


def indexed_values(reading: Reading) -> dict[str, Any]:
    """Return the values of our flags of a decoder with an indexer in every layer."""
    numbers = list(layer_numbers(reading))
    kinds, first = reading.get("mlp_layer_types"), reading.integer("first_k_dense_replace", least=0)
    if isinstance(kinds, list):
        first = kinds.count(_KINDS[0])
    words = f"but supported are dense layers first and sparse ones after them, of num_hidden_layers {len(numbers)}"
    expected = [_KINDS[number >= first] for number in numbers]
    reading.refuse_unless("mlp_layer_types", expected, expected, words)
    attention = ["indexed_attention"] * len(numbers)
    reading.refuse_unless("layer_types", attention, attention, "only indexed_attention in every layer is supported")
    values = {
        **{**latents.latent_values(reading), **_MIXTURE.values(reading, first), **ahead_values(reading)},
        **{ours: reading.integer(theirs) for theirs, ours in _SIZES.items()},
    }
    if values["q_lora_rank"] is None:
        reading.problems.append("q_lora_rank is null, but the indexer reads the latents of queries")
    return {**values, "dsa_indexer_k_norm_epsilon": _epsilon_of_keys(values["norm_epsilon"])}


def indexed_json(config: Config) -> dict[str, Any]:
    """Return the content of `config.json` of the same."""
    mixture, model = _MIXTURE.json(config), config.model
    first = mixture["first_k_dense_replace"]
    return {
        **{**latents.latent_json(config), **mixture, **ahead_json(config)},
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "mlp_layer_types": [_KINDS[number >= first] for number in range(model.num_layers)],
    }


def what_indexers_can_say(model: ModelConfig) -> dict[str, Any]:
    """Return values that follow from others (`Family.dependent_flags`)."""
    epsilon = {"dsa_indexer_k_norm_epsilon": _epsilon_of_keys(model.norm_epsilon)}
    return {**latents.what_latents_can_say(model), **_MIXTURE.dependent_flags(model), **epsilon}


def _epsilon_of_keys(others: float) -> float | None:
    return None if others == _EPSILON else _EPSILON


DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    INDEXED_NAMES,
    INDEXED_FLAGS,
    indexed_values,
    indexed_json,
    {
        **{**INDEXED_DEFAULTS, "index_n_heads": 64, "max_position_embeddings": 163840},
        **{"n_group": 8, "topk_group": 4},
    },
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=what_indexers_can_say,
    may_be_dense=True,
)
