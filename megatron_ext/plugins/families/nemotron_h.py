"""Nemotron-H: layers of Mamba-2, attention without positions, squared ReLU or experts, each alone
(`--hybrid-layer-pattern` of `M`, `*`, `-`, `E`); transformers 5.23 bounds time steps by `time_step_min`, we do not; its
class never ties embeddings (`--untie-embeddings-and-output-weights`)."""

import re
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import mamba_layers
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import V3_MIXTURE
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.families.shared import QKV, shared_expert_width

_KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
_KEYS = mamba_layers.MambaKeys(
    *("ssm_state_size", "mamba_head_dim", "n_groups", "mamba_num_heads", "conv_kernel", "chunk_size", "expand"),
    *("use_conv_bias", "mamba_proj_bias", "mamba_hidden_act"),
    fills=False,
)
_WIDTH, _LATENT = "moe_shared_expert_intermediate_size", "moe_latent_size"


def _read(reading: Reading) -> dict[str, Any]:
    pattern = mamba_layers.letters(reading, _KINDS, "hybrid_override_pattern")
    sized, last = reading.changed(num_hidden_layers=len(pattern)), len(pattern)
    experts = V3_MIXTURE.values(sized, 0 if "E" in pattern else last)
    if "E" in pattern:
        experts[_WIDTH] = reading.integer(_WIDTH)
    latent = reading.get(_LATENT)
    heads, groups = reading.integer("num_attention_heads"), reading.integer("num_key_value_heads")
    if heads % groups:
        reading.problems.append(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
    usual = dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), False) | {"sliding_window": None}
    refuse_others(reading, {**usual, "mlp_hidden_act": "relu2"})
    reading.refuse_unless("num_hidden_layers", last, last, f"but the list of layers has {last}")
    reading.understand(_WIDTH, "mamba_ssm_cache_dtype", "moe_shared_expert_overlap")
    reading.understand("mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_logits_to_keep")
    reading.understand("use_mamba_kernels")
    reading.refuse_unless("tie_word_embeddings", False, False, "but transformers never ties embeddings here")
    return {
        **experts,
        **mamba_layers.mamba_values(reading, _KEYS),
        _LATENT: reading.integer(_LATENT) if latent is not None and "E" in pattern else None,
        "hybrid_layer_pattern": pattern,
        "num_layers": len(pattern),
        "hidden_size": reading.integer("hidden_size"),
        "ffn_hidden_size": reading.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": reading.integer("head_dim"),
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "vocab_size": reading.integer("vocab_size"),
        "max_position_embeddings": reading.integer("max_position_embeddings", 4096),
    }


def _write(config: Config) -> dict[str, Any]:
    model, words = config.model, {letter: word for word, letter in _KINDS.items()}
    experts = V3_MIXTURE.json(config)
    del experts["first_k_dense_replace"]
    if model.num_experts is not None:
        experts |= {"n_shared_experts": 1, _WIDTH: model.moe_shared_expert_intermediate_size}
        experts[_LATENT] = model.moe_latent_size
    return {
        **experts,
        **mamba_layers.mamba_json(config, _KEYS),
        "time_step_min": 1e-20,
        "layers_block_type": [words[letter] for letter in model.hybrid_layer_pattern or ""],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.kv_channels,
        "layer_norm_epsilon": model.norm_epsilon,
        "max_position_embeddings": model.max_position_embeddings,
        "mlp_hidden_act": "relu2",
    }


def _dependent(model: ModelConfig) -> dict[str, Any]:
    pattern = re.sub(r"[^M*E-]", "M", model.hybrid_layer_pattern or "M" * model.num_layers)
    shared = {_WIDTH: shared_expert_width(model)}
    mixture = {**V3_MIXTURE.dependent_flags(model), **shared} if model.num_experts is not None else {}
    return {**mixture, "hybrid_layer_pattern": pattern}


NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    {
        **mamba_layers.BACKBONE_NAMES,
        **{QKV: ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), "self_attention.linear_proj": ("mixer.o_proj",)},
        **{"pre_mlp_layernorm": ("norm",), "mlp.linear_fc1": ("mixer.up_proj",), "mlp.router": ("mixer.gate",)},
        **{"mlp.linear_fc2": ("mixer.down_proj",), EXPERT_BIAS: ("mixer.gate.e_score_correction_bias",)},
        **{f"mlp.fc{one}_latent_proj": (f"mixer.fc{one}_latent_proj",) for one in (1, 2)},
        **{
            f"mlp.{kind}.linear_fc{number}": (f"mixer.{theirs}.{name}_proj",)
            for kind, theirs in (("experts", "experts.{}"), ("shared_experts", "shared_experts"))
            for number, name in enumerate(("up", "down"), 1)
        },
    },
    {
        **{"normalization": "RMSNorm", "position_embedding_type": "none", "disable_bias_linear": True},
        **{"squared_relu": True, "untie_embeddings_and_output_weights": True},
    },
    _read,
    _write,
    {
        **{"hidden_size": 4096, "vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"head_dim": 128, "intermediate_size": 21504, "ssm_state_size": 128, "mamba_num_heads": 128},
        **{"mamba_head_dim": 64, "n_groups": 8, "n_routed_experts": 8, "n_shared_experts": 1},
        **{"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2},
    },
    {
        **{
            "layer_types": "layers_block_type",
            "n_routed_experts": "num_local_experts",
            "head_dim": "attention_head_dim",
        },
        **{"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"},
    },
    dependent_flags=_dependent,
    may_be_dense=True,
    layers="backbone.layers.{}.",
    sections=mamba_layers.MAMBA_SECTIONS,
    dropouts=("attention_dropout", "hidden_dropout"),
)
