"""LFM2: gated short convolutions in the layers that `layer_types` calls `conv` (`--full-attn-idxs` names the others,
`--conv-l-cache`, `--conv-bias`), norms of queries and keys; the width of the MLP is read as it follows from
`block_auto_adjust_ff_dim` and written as it is."""

from typing import Any

from megatron_ext.config.schema import flags_of
from megatron_ext.config.schema.option import MOST
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family, Sections
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.short_convolution.flags import ShortConvolutionFlags

_KINDS = ("conv", "full_attention")
_UNREAD = ("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
_UNREAD += ("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads")


def _attending(reading: Reading) -> dict[str, Any]:
    numbers = shared.layer_numbers(reading)
    named = reading.integers("full_attn_idxs", len(numbers), numbers)
    attends = shared.typed_layers(reading, _KINDS, [number in named for number in numbers])
    shared.refuse_others(reading, {"block_use_swiglu": True, "use_pos_enc": True})
    reading.understand(*_UNREAD)
    return {"full_attn_idxs": None if all(attends) else tuple(number for number in numbers if attends[number])}


def _width(reading: Reading) -> dict[str, Any]:
    """Return the width of the MLP, which files give three halves of, before it is rounded up."""
    width, multiple = reading.integer("intermediate_size"), reading.integer("block_multiple_of", 256)
    factor = reading.number("block_ffn_dim_multiplier", 1.0)
    if reading.boolean("block_auto_adjust_ff_dim", True):
        width = -(-int(min(factor * int(2 * width / 3), MOST)) // multiple) * multiple
    return {"ffn_hidden_size": width}


LFM2_KEYS = shared.keys(
    shared.decoder(epsilon="norm_eps"),
    shared.size("conv_L_cache", "conv_l_cache"),
    shared.switch("conv_bias", "conv_bias", False),
    (_attending, lambda config: {"layer_types": [_KINDS[one.has_attention] for one in layers(config)]}),
)
LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    {
        **{**shared.ATTENTION_NAMES, "input_layernorm": ("operator_norm",), "pre_mlp_layernorm": ("ffn_norm",)},
        **{f"self_attention.{part}_layernorm": (f"self_attn.{part}_layernorm",) for part in "qk"},
        **{"self_attention.linear_proj": ("self_attn.out_proj",), "self_attention.conv1d": ("conv.conv",)},
        **{f"self_attention.{part}_proj": (f"conv.{part}_proj",) for part in ("in", "out")},
        **{"mlp.linear_fc1": ("feed_forward.w1", "feed_forward.w3"), "mlp.linear_fc2": ("feed_forward.w2",)},
        "decoder.final_layernorm": ("model.embedding_norm",),
    },
    {**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True},
    *shared.keys(LFM2_KEYS, (_width, lambda config: {"block_auto_adjust_ff_dim": False})),
    {
        **{"rope_theta": 1e6, "norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 128000},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "hidden_size": 2560},
        **{"intermediate_size": 12288, "num_hidden_layers": 32, "conv_L_cache": 3},
    },
    {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"},
    dependent_flags=lambda model: {"full_attn_idxs": flags_of(model, ShortConvolutionFlags).full_attn_idxs or (0,)},
    dropouts=(),
    sections={"self_attention.in_proj": Sections((3,), by_groups=False)},  # all B, all C, all x
)
