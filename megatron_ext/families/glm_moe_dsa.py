"""GLM-5: DeepSeek-V3.2's layers, whose indexer rotates neighbouring channels."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import deepseek_v32
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import layer_numbers


def _read(reading: Reading) -> dict[str, Any]:
    full = ["full"] * len(list(layer_numbers(reading)))
    words = "but layers that take the keys of an earlier layer's choice (arXiv:2603.12201) are not supported"
    reading.refuse_unless("indexer_types", full, full, words)
    reading.refuse_unless("index_topk_freq", 1, 1, words)
    reading.refuse_unless("index_topk_pattern", None, None, words)
    reading.refuse_unless("indexer_rope_interleave", True, True, "only true is supported")
    reading.understand("index_skip_topk_offset")
    return deepseek_v32.indexed_values(reading)


def _write(config: Config) -> dict[str, Any]:
    return {**deepseek_v32.indexed_json(config), "indexer_types": ["full"] * config.model.num_layers}


GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    deepseek_v32.INDEXED_NAMES,
    {**deepseek_v32.INDEXED_FLAGS, "dsa_indexer_rope_interleaved": True},
    _read,
    _write,
    {
        **{**deepseek_v32.INDEXED_DEFAULTS, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
        **{"index_n_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752},
    },
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=deepseek_v32.what_indexers_can_say,
    may_be_dense=True,
)
