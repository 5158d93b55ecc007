"""GPT-J: attention and MLP in parallel through one norm, the first `rotary_dim` channels of a head rotated, biases of
the MLP and of the logits."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.gpt2 import GPT2
from megatron_ext.plugins.families.reading import Reading

_KEYS = ("n_embd", "n_head", "n_layer", "n_positions", "layer_norm_epsilon")
_ROTATED = "rotary_dim"


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.plain_values(reading, *_KEYS)
    head, rotated = values["kv_channels"], reading.integer(_ROTATED)
    if (rotated > head or rotated % 2) and reading.is_readable:
        reading.problems.append(
            f"{_ROTATED} is {rotated}, and not an even number of the {head} channels of a head by n_head"
        )
    shared.refuse_others(reading, {"scale_attn_weights": True})
    reading.understand("n_ctx", "rotary", "gradient_checkpointing", "tokenizer_class")
    return {**values, "rotary_percent": min(rotated / head, 1.0)}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {**shared.plain_json(model, *_KEYS), _ROTATED: int(model.kv_channels * model.rotary_percent)}


def whole_channels(model: ModelConfig) -> dict[str, Any]:
    """Return the share of a head that whole channels are (`Family.dependent_flags`)."""
    channels = int(model.kv_channels * model.rotary_percent)
    return {**shared.heads_fill_width(model), "rotary_percent": channels / model.kv_channels}


GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    {
        **{
            name: theirs
            for name, theirs in GPT2.names.items()
            if "position" not in name and name != "pre_mlp_layernorm"
        },
        shared.QKV: ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "self_attention.linear_proj": ("attn.out_proj",),
        "mlp.linear_fc1": ("mlp.fc_in",),
        "mlp.linear_fc2": ("mlp.fc_out",),
    },
    {
        **{"position_embedding_type": "rope", "rotary_interleaved": True, "parallel_residual": "one-norm"},
        **{**shared.bias_flags(False, False, True), "lm_head_bias": True},
    },
    *shared.keys((_read, _write), shared.gelu_mlp("n_inner", "n_embd")),
    {"tie_word_embeddings": False, _ROTATED: 64, "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400},
    aliases=GPT2.aliases,
    dependent_flags=whole_channels,
    layers=GPT2.layers,
    dropouts=GPT2.dropouts,
    is_seldom=True,
)
