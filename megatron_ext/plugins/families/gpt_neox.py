"""GPT-NeoX-20B, Pythia, Dolly: attention and MLP in parallel, each through its own norm (`--parallel-residual
two-norms`), or one after another; a share of the channels rotated; biases in all matrices, or not in those of
attention.

Queries, keys and values lie in Megatron's order.
"""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.bloom import BLOOM
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading

_NAMES = {
    **BLOOM.names,
    "embedding.word_embeddings": ("gpt_neox.embed_in",),
    shared.QKV: ("attention.query_key_value",),
    "self_attention.linear_proj": ("attention.dense",),
    "decoder.final_layernorm": ("gpt_neox.final_layer_norm",),
    "output_layer": ("embed_out",),
}
_KEYS = ("intermediate_size", "hidden_act", "layer_norm_eps")
_ROTARY = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def _read(reading: Reading) -> dict[str, Any]:
    reading.understand("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob", "is_decoder")
    form = "two-norms" if reading.boolean("use_parallel_residual", True) else "none"
    return {**shared.rotated_plain_values(reading, *_KEYS, partial=True), "parallel_residual": form}


def _write(config: Config) -> dict[str, Any]:
    content = shared.rotated_plain_json(config.model, *_KEYS, partial=True)
    return {
        **{_ROTARY.get(key, key): value for key, value in content.items()},
        "use_parallel_residual": config.model.parallel_residual != "none",
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    form = "none" if model.parallel_residual == "none" else "two-norms"
    return {**shared.heads_fill_width(model), **shared.biased_mlp(model), "parallel_residual": form}


GPT_NEOX = Family(
    *("gpt_neox", "GPTNeoXForCausalLM", _NAMES, {"position_embedding_type": "rope"}),
    *shared.keys((_read, _write), shared.BIASED_MLP),
    {"tie_word_embeddings": False, "partial_rotary_factor": 0.25, "intermediate_size": 24576},
    aliases=_ROTARY,
    dependent_flags=_dependent_flags,
    layers="gpt_neox.layers.{}.",
    qkv_by_groups=True,
    dropouts=("attention_dropout", "hidden_dropout"),
)
