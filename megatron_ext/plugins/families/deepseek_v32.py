"""DeepSeek-V3.2, bf16: deepseek_v3 with an indexer of keys (`--experimental-attention-variant dsa`); transformers 5.23
trains no indexer, so that its gradients are compared with the published formulas alone."""

from functools import partial
from itertools import starmap
from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import latents, shared
from megatron_ext.plugins.families.deepseek_v3 import DEEPSEEK_V3
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import AHEAD, V3_MIXTURE, first_typed, typed_json
from megatron_ext.plugins.families.reading import Reading

_epsilon = partial(shared.own_epsilon, "dsa_indexer_k_norm_epsilon", 1e-6)

_SIZES = {f"index_{one}": f"dsa_indexer_{one}" for one in ("n_heads", "head_dim", "topk")}
_INDEXER = {"linear_wq_b": "wq_b", "linear_wk": "wk", "k_norm": "k_norm", "linear_weights_proj": "weights_proj"}


def _read(reading: Reading) -> dict[str, Any]:
    first = first_typed(reading, reading.integer("first_k_dense_replace", least=0))
    attention = ["indexed_attention"] * len(shared.layer_numbers(reading))
    reading.refuse_unless("layer_types", attention, attention, "only indexed_attention in every layer is supported")
    values = {**latents.latent_values(reading), **V3_MIXTURE.values(reading, first)}
    if values["q_lora_rank"] is None:
        reading.problems.append("q_lora_rank is null, but the indexer reads the latents of queries")
    return {**values, **_epsilon(values["norm_epsilon"])}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**DEEPSEEK_V3.dependent_flags(model), **_epsilon(model.norm_epsilon)}


DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    {
        **DEEPSEEK_V3.names,
        **{
            f"self_attention.core_attention.indexer.{ours}": (f"self_attn.indexer.{theirs}",)
            for ours, theirs in _INDEXER.items()
        },
    },
    {**latents.LATENT_FLAGS, "experimental_attention_variant": "dsa"},
    *shared.keys(
        (_read, lambda config: {**latents.latent_json(config), **V3_MIXTURE.json(config), **typed_json(config)}),
        AHEAD,
        *starmap(shared.size, _SIZES.items()),
    ),
    {
        **{**DEEPSEEK_V3.defaults, "max_position_embeddings": 163840},
        **{"index_n_heads": 64, "index_topk": 2048, "index_head_dim": 128},
    },
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=_dependent_flags,
    may_be_dense=True,
)
