"""Falcon 7B, 11B, 40B, 180B: parallel through one norm or two, or one after another; any number of groups; biases in
all matrices or none. An export of a parallel one says `new_decoder_architecture`, with which transformers computes the
same. Not with ALiBi (Falcon-RW): its slopes are divided by the root of the head size there, and rounded to 16 bits."""

from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.bloom import BLOOM
from megatron_ext.plugins.families.reading import Reading

_FORMS = ("none", "one-norm", "two-norms")
_TWO_NORMS = {"input_layernorm": ("ln_attn",), "pre_mlp_layernorm": ("ln_mlp",)}


def _read(reading: Reading) -> dict[str, Any]:
    # Falcon divides ALiBi's slopes by the root of the head size, and rounds them to 16 bits.
    shared.refuse_others(reading, {"alibi": False, "apply_residual_connection_post_layernorm": False})
    reading.understand("ff_factor")  # which ffn_hidden_size says, too
    values = shared.rotated_plain_values(reading, "ffn_hidden_size", "activation", "layer_norm_epsilon")
    heads, is_new = values["num_attention_heads"], reading.boolean("new_decoder_architecture", False)
    if is_new:
        reading.refuse_unless("parallel_attn", True, True, "but with new_decoder_architecture it is parallel")
    norms = reading.integer("num_ln_in_parallel_attn", 1 + is_new)
    if norms > 1 + is_new:
        reading.problems.append(f"num_ln_in_parallel_attn is {norms}; supported is {'1 or 2' if is_new else 1}")
    groups, is_shared = reading.integer("num_kv_heads", heads), reading.boolean("multi_query", True)
    groups = groups if is_new else 1 if is_shared else heads
    form = _FORMS[min(norms, 2) if reading.boolean("parallel_attn", True) else 0]
    values |= {"group_query_attention": groups != heads, "num_query_groups": groups, "parallel_residual": form}
    return {**values, "disable_bias_linear": not reading.boolean("bias", False)}


def _write(config: Config) -> dict[str, Any]:
    model, form = config.model, _FORMS.index(config.model.parallel_residual)
    return {
        **shared.rotated_plain_json(model, "ffn_hidden_size", "activation", "layer_norm_epsilon"),
        "bias": not model.disable_bias_linear,
        "num_kv_heads": model.num_key_value_heads,
        "multi_query": model.num_key_value_heads == 1,
        "parallel_attn": form > 0,
        "new_decoder_architecture": form > 0,
        "num_ln_in_parallel_attn": form or None,
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    groups, heads = model.num_key_value_heads, model.num_attention_heads
    one = {"num_query_groups": 1} if model.parallel_residual == "none" and groups not in (1, heads) else {}
    return {**shared.heads_fill_width(model), **one}


FALCON = replace(
    BLOOM,
    **{"model_type": "falcon", "architecture": "FalconForCausalLM", "flags": {"position_embedding_type": "rope"}},
    **{"read": _read, "write": _write, "defaults": {}, "aliases": {"hidden_size": "n_embed"}},
    dependent_flags=_dependent_flags,
    dependent_names=lambda model: _TWO_NORMS if model.parallel_residual == "two-norms" else {},
)
