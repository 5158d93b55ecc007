"""GLM-5: deepseek_v32 whose indexer rotates neighbouring channels (`--dsa-indexer-rope-interleaved`); layers that take
the choice of an earlier layer (`indexer_types` shared) are refused."""

from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families.deepseek_v32 import DEEPSEEK_V32
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import layer_numbers


def _read(reading: Reading) -> dict[str, Any]:
    full = ["full"] * len(list(layer_numbers(reading)))
    words = "but layers that take the keys of an earlier layer's choice (arXiv:2603.12201) are not supported"
    reading.refuse_unless("indexer_types", full, full, words)
    reading.refuse_unless("index_topk_freq", 1, 1, words)
    reading.refuse_unless("index_topk_pattern", None, None, words)
    reading.refuse_unless("indexer_rope_interleave", True, True, "only true is supported")
    reading.understand("index_skip_topk_offset")
    return DEEPSEEK_V32.read(reading)


def _write(config: Config) -> dict[str, Any]:
    return {**DEEPSEEK_V32.write(config), "indexer_types": ["full"] * config.model.num_layers}


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    **{"model_type": "glm_moe_dsa", "architecture": "GlmMoeDsaForCausalLM", "read": _read, "write": _write},
    flags={**DEEPSEEK_V32.flags, "dsa_indexer_rope_interleaved": True},
    defaults={
        **{**DEEPSEEK_V32.defaults, "n_group": 1, "topk_group": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192},
        **{"v_head_dim": 256, "index_n_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752},
    },
)
