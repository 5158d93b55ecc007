"""GPT-2: learned positions, LayerNorm, biases everywhere, and matrices that lie transposed."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import QKV, gelu_values, heads_fill_width

_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("transformer.wte",),
    "embedding.position_embeddings": ("transformer.wpe",),
    "input_layernorm": ("ln_1",),
    QKV: ("attn.c_attn",),
    "self_attention.linear_proj": ("attn.c_proj",),
    "pre_mlp_layernorm": ("ln_2",),
    "mlp.linear_fc1": ("mlp.c_fc",),
    "mlp.linear_fc2": ("mlp.c_proj",),
    "decoder.final_layernorm": ("transformer.ln_f",),
    "output_layer": ("lm_head",),
}


def _read(reading: Reading) -> dict[str, Any]:
    hidden, heads = reading.integer("n_embd"), reading.integer("n_head")
    if hidden % heads:
        reading.problems.append(f"n_embd {hidden} is not divisible by n_head {heads}")
    reading.refuse_unless("scale_attn_weights", True, True, "only true is supported")
    reading.refuse_unless("scale_attn_by_inverse_layer_idx", False, False, "only false is supported")
    reading.refuse_unless("add_cross_attention", False, False, "only false is supported")
    positions = reading.integer("n_positions")
    reading.refuse_unless("n_ctx", positions, positions, f"but n_positions is {positions}, and both are the positions")
    return {
        "num_layers": reading.integer("n_layer"),
        "hidden_size": hidden,
        "ffn_hidden_size": reading.integer("n_inner", 4 * hidden),
        "num_attention_heads": heads,
        "kv_channels": max(hidden // heads, 1),
        "num_query_groups": heads,
        **gelu_values(reading, "activation_function", "gelu_new"),
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not reading.boolean("tie_word_embeddings", True),
        "vocab_size": reading.integer("vocab_size"),
        "max_position_embeddings": positions,
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        "activation_function": "gelu_new" if model.openai_gelu else "gelu",
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _NAMES,
    {},
    _read,
    _write,
    aliases={
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    dependent_flags=heads_fill_width,
    layers="transformer.h.{}.",
    headless_prefix="transformer.",
    transposed=frozenset({QKV, "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}),
)
