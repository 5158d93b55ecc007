"""MiniCPM3: youtu whose class rotates halves of a head: these rows are read and written in the order of neighbours;
`scale_emb`, `scale_depth` and `dim_model_base` are `--embedding-multiplier`, `--residual-multiplier` and
`--logits-multiplier`."""

import math
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import latents
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import DECODER_NAMES

_BASE, _DEPTH, _EMBEDDING = "dim_model_base", "scale_depth", "scale_emb"


def _read(reading: Reading) -> dict[str, Any]:
    hidden, heads = reading.integer("hidden_size"), reading.integer("num_attention_heads")
    sized = reading.changed(
        v_head_dim=reading.integer("v_head_dim", max(hidden // heads, 1)),
        head_dim=reading.integer("head_dim", reading.integer("qk_rope_head_dim")),
    )
    values = latents.latent_values(sized, ("yarn", "longrope"))
    branches = reading.number(_DEPTH, 1.4) / math.sqrt(values["num_layers"])
    return {
        **values,
        "embedding_multiplier": reading.number(_EMBEDDING, 12),
        "residual_multiplier": branches,
        "logits_multiplier": reading.integer(_BASE, 256) / hidden,
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **latents.latent_json(config),
        _EMBEDDING: model.embedding_multiplier,
        _DEPTH: model.residual_multiplier * math.sqrt(model.num_layers),
        _BASE: round(model.logits_multiplier * model.hidden_size),
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    base = max(round(model.logits_multiplier * model.hidden_size), 1)
    return {**latents.what_latents_can_say(model), "logits_multiplier": base / model.hidden_size}


MINICPM3 = Family(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    {**DECODER_NAMES, **latents.LATENT_NAMES},
    latents.LATENT_FLAGS,
    _read,
    _write,
    {
        **{**latents.LATENT_DEFAULTS, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64},
        **{"qk_rope_head_dim": 32, "v_head_dim": None, "max_position_embeddings": 32768, "tie_word_embeddings": True},
        **{"vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62},
        **{"num_attention_heads": 40, "rms_norm_eps": 1e-5},
    },
    dependent_flags=_dependent_flags,
    rotates="halves",
)
