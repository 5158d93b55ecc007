"""Falcon: attention and MLP in parallel through one norm (7B, 11B) or two (40B, 180B), or one after another, and
Megatron's order of queries, keys and values."""

import json
from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.bloom import BLOOM
from megatron_ext.families.reading import Reading

_KEYS = (*shared.PLAIN_KEYS, "layer_norm_epsilon")
_FORMS = ("none", "one-norm", "two-norms")


def _read(reading: Reading) -> dict[str, Any]:
    # ALiBi's slopes are divided by the root of the head size there, and rounded to 16 bits.
    shared.refuse_others(reading, {"alibi": False, "apply_residual_connection_post_layernorm": False})
    reading.understand("ff_factor")  # which ffn_hidden_size says, too
    values = shared.plain_values(reading, *_KEYS)
    heads, is_new = values["num_attention_heads"], reading.boolean("new_decoder_architecture", False)
    shares, is_parallel = (reading.boolean(key, True) for key in ("multi_query", "parallel_attn"))
    groups, norms = reading.integer("num_kv_heads", heads), reading.integer("num_ln_in_parallel_attn", 1 + is_new)
    if norms > 1 + is_new or is_new > is_parallel:
        reading.problems.append(
            f"num_ln_in_parallel_attn is {norms} and parallel_attn {json.dumps(is_parallel)}; supported are true and 1 "
            "or 2 with new_decoder_architecture, and 1 without it"
        )
    groups = groups if is_new else 1 if shares else heads
    return {
        **values,
        **shared.rotary_values(reading),
        **shared.gelu_values(reading, "activation", "gelu"),
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "ffn_hidden_size": reading.integer("ffn_hidden_size", values["ffn_hidden_size"]),
        "disable_bias_linear": not reading.boolean("bias", False),
        "parallel_residual": _FORMS[min(norms, 2)] if is_parallel else "none",
    }


def _write(config: Config) -> dict[str, Any]:
    model, is_parallel = config.model, config.model.parallel_residual != "none"
    return {
        **shared.plain_json(model, *_KEYS),
        **shared.rotary_json(model),
        "ffn_hidden_size": model.ffn_hidden_size,
        "activation": "gelu_new" if model.openai_gelu else "gelu",
        "bias": not model.disable_bias_linear,
        "num_kv_heads": model.num_key_value_heads,
        "multi_query": model.num_key_value_heads == 1,
        "parallel_attn": is_parallel,
        "new_decoder_architecture": is_parallel,
        "num_ln_in_parallel_attn": _FORMS.index(model.parallel_residual) or None,
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    groups, heads = model.num_key_value_heads, model.num_attention_heads
    one = {"num_query_groups": 1} if model.parallel_residual == "none" and groups not in (1, heads) else {}
    return {**shared.heads_fill_width(model), **one}


def _names(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    two = {"input_layernorm": ("ln_attn",), "pre_mlp_layernorm": ("ln_mlp",)}
    return two if model.parallel_residual == "two-norms" else {}


FALCON = replace(
    BLOOM,
    model_type="falcon",
    architecture="FalconForCausalLM",
    flags={"position_embedding_type": "rope"},
    read=_read,
    write=_write,
    defaults={},
    aliases={"hidden_size": "n_embed"},
    dependent_flags=_dependent_flags,
    dependent_names=_names,
)
