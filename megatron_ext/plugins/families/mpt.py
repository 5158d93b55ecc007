"""MPT, as transformers computes it: `--position-embedding-type alibi`, LayerNorm and matrices without biases,
`--qkv-clip` (`clip_qkv`)."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import WITHOUT_BEARING, Reading
from megatron_ext.plugins.families.shared import QKV, plain_json, plain_values, refuse_others, square_flags

_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("transformer.wte",),
    "input_layernorm": ("norm_1",),
    QKV: ("attn.Wqkv",),
    "self_attention.linear_proj": ("attn.out_proj",),
    "pre_mlp_layernorm": ("norm_2",),
    "mlp.linear_fc1": ("ffn.up_proj",),
    "mlp.linear_fc2": ("ffn.down_proj",),
    "decoder.final_layernorm": ("transformer.norm_f",),
    "output_layer": ("lm_head",),
}
_KEYS = ("d_model", "n_heads", "n_layers", "max_seq_len", "layer_norm_epsilon")
_NUMBERS = {"qkv_clip": "clip_qkv", "softmax_scale": "softmax_scale"}


def _read(reading: Reading) -> dict[str, Any]:
    attention = Reading(reading.section("attn_config"), {})
    refuse_others(attention, {"attn_type": "multihead_attention", "qk_ln": False, "prefix_lm": False})
    refuse_others(attention, {"alibi": True, "alibi_bias_max": 8, "attn_uses_sequence_id": False})
    values: dict[str, Any] = {name: attention.number_or_none(key) for name, key in _NUMBERS.items()}
    # transformers drops nothing else, and residual branches at this rate, whatever resid_pdrop and emb_pdrop say.
    dropout = attention.number_from_0("attn_pdrop", below=1.0)
    values |= {"attention_dropout": dropout, "hidden_dropout": dropout}
    attention.refuse_the_rest("is not known", but=sum(WITHOUT_BEARING.values(), ("attn_impl", "is_encoder_decoder")))
    refuse_others(reading, {"expansion_ratio": 4, "no_bias": True, "embedding_fraction": 1.0})
    reading.understand("learned_pos_emb", "init_device", "norm_type")  # which transformers does not read
    reading.problems += [f"attn_config: {problem}" for problem in attention.problems]
    return {**plain_values(reading, *_KEYS), **values}


def _write(config: Config) -> dict[str, Any]:
    attention = {key: getattr(config.model, name) for name, key in _NUMBERS.items()}
    # attn_pdrop is left out: transformers 5 declares it a whole number, and refuses any folder that states a rate.
    return {**plain_json(config.model, *_KEYS), "attn_config": attention}


MPT = Family(
    "mpt",
    "MptForCausalLM",
    _NAMES,
    {"position_embedding_type": "alibi", "norm_parameters": "weight", "disable_bias_linear": True},
    _read,
    _write,
    {"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 50368},
    aliases={"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
    dependent_flags=square_flags,
    layers="transformer.blocks.{}.",
    dropouts=(),
)
