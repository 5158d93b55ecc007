"""GPT-2: learned positions, LayerNorm, transposed matrices, tanh or exact GELU."""

from typing import Any

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.families.shared import (
    PLAIN_KEYS,
    QKV,
    gelu_mlp,
    heads_fill_width,
    keys,
    plain_json,
    plain_values,
)

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


_KEYS = ("n_embd", "n_head", "n_layer", "n_positions", "layer_norm_epsilon")


def _read(reading: Reading) -> dict[str, Any]:
    refuse_others(
        reading,
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    )
    values, positions = plain_values(reading, *_KEYS), reading.integer("n_positions")
    reading.refuse_unless("n_ctx", positions, positions, f"but n_positions is {positions}, and both are the positions")
    return values


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _NAMES,
    {},
    *keys((_read, lambda config: plain_json(config.model, *_KEYS)), gelu_mlp("n_inner", "n_embd")),
    dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1),
    aliases=dict(zip(_KEYS, PLAIN_KEYS, strict=False)),
    dependent_flags=heads_fill_width,
    layers="transformer.h.{}.",
    transposed=frozenset({QKV, "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}),
    dropouts=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    other_names={"gpt-sw3": {}},  # whose class it is
)
