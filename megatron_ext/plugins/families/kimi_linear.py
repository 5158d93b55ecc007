"""Kimi Linear: deepseek_v3's attention that rotates nothing (`--position-embedding-type none`) and its experts, Kimi
Delta Attention (`--experimental-attention-variant kda`) in the other layers; names and keys as published.

Files and keys are as published (Kimi Team 2025, arXiv:2510.26692). What transformers 5.23 writes itself names the MLP
of layers without experts `block_sparse_moe`, where the published files have `mlp`.
"""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families import delta_rules, latents
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import V3_MIXTURE, mixture_names, typed_mixtures
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.families.shared import DECODER_NAMES, layer_numbers
from megatron_ext.plugins.gated_delta.flags import GatedDeltaFlags

_LINEAR, _ATTENTION_LAYERS, _RULE_LAYERS = "linear_attn_config", "full_attn_layers", "kda_layers"
_SIZES = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
_SIZES["linear_conv_kernel_dim"] = "short_conv_kernel_size"
_ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_RULE = delta_rules.rule_names(
    "self_attn",
    in_proj=("q_proj", "k_proj", "v_proj", "b_proj"),
    gates_in_proj=("f_a_proj", "g_a_proj"),
    decay_out_proj=("f_b_proj",),
    gate_out_proj=("g_b_proj",),
    **delta_rules.APART,
)


def _read(reading: Reading) -> dict[str, Any]:
    inner = Reading(reading.section(_LINEAR), {})
    inner.problems = reading.problems
    sizes = [inner.integer(theirs, reading.integer(ours)) for ours, theirs in _SIZES.items()]
    named, without = inner.get(_RULE_LAYERS), inner.get(_ATTENTION_LAYERS)
    numbers = layer_numbers(reading)
    usual = [number == 0 or number % 4 != 0 for number in numbers]
    if isinstance(named, list) and isinstance(without, list):
        usual = [number + 1 in named for number in numbers]  # counted from 1
        others = [number + 1 for number, one in enumerate(usual) if not one]
        inner.refuse_unless(_ATTENTION_LAYERS, others, others, f"but {_RULE_LAYERS} leaves {others}")
    inner.refuse_the_rest(f"a key of {_LINEAR} that is not known")
    # Nothing is rotated, whatever is said of it, and a head has the sizes of its two parts.
    said = dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "head_dim"))
    reading.understand(*said)
    of_attention = latents.latent_values(reading.changed(**said))
    refuse_others(reading, {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True})
    reading.refuse_unless("tie_word_embeddings", False, False, "but transformers never ties embeddings here")
    first = typed_mixtures(reading, reading.integer("first_k_dense_replace", 1, least=0))
    count = reading.integer("num_experts")
    reading.refuse_unless("n_routed_experts", count, count, f"but num_experts is {count}; keep one of them")
    experts = reading.changed(n_routed_experts=count)
    return {
        **{name: value for name, value in of_attention.items() if name not in ("rotary_base", "rope_type")},
        **delta_rules.rule_values(reading, "kda", usual),
        **dict(zip(("linear_key_head_dim", "linear_num_key_heads", "linear_conv_kernel_dim"), sizes, strict=True)),
        **{"linear_value_head_dim": sizes[0], "linear_num_value_heads": sizes[1]},
        **V3_MIXTURE.values(experts, first),
    }


def _write(config: Config) -> dict[str, Any]:
    model, has_attention = config.model, [layer.has_attention for layer in layers(config)]
    content = {**latents.latent_json(config), **V3_MIXTURE.json(config)}
    for key in ("rope_theta", "rope_scaling", "head_dim"):
        content.pop(key, None)
    if "n_routed_experts" in content:
        content["num_experts"] = content.pop("n_routed_experts")
    content = {_ALIASES.get(key, key) if key != "num_experts" else key: value for key, value in content.items()}
    rule = flags_of(model, GatedDeltaFlags)
    linear = {
        _ATTENTION_LAYERS: [number + 1 for number, one in enumerate(has_attention) if one],
        _RULE_LAYERS: [number + 1 for number, one in enumerate(has_attention) if not one],
        "head_dim": rule.linear_key_head_dim,
        "num_heads": rule.linear_num_key_heads,
        "short_conv_kernel_size": rule.linear_conv_kernel_dim,
    }
    fixed = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True}
    return {**content, _LINEAR: linear, **fixed, "moe_layer_freq": 1, "pad_token_id": None}


def _dependent(model: ModelConfig) -> dict[str, Any]:
    rule = flags_of(model, GatedDeltaFlags)
    heads = {"linear_value_head_dim": rule.linear_key_head_dim, "linear_num_value_heads": rule.linear_num_key_heads}
    heads["untie_embeddings_and_output_weights"] = True
    return {**latents.what_latents_can_say(model), **V3_MIXTURE.dependent_flags(model), **heads}


KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    {
        **{**DECODER_NAMES, **mixture_names("block_sparse_moe", gate="w1", up="w3", down="w2")},
        **{**latents.LATENT_NAMES, **_RULE},
    },
    {**latents.LATENT_FLAGS, "position_embedding_type": "none"},
    _read,
    _write,
    {
        **{**latents.LATENT_DEFAULTS, "q_lora_rank": None, "vocab_size": 163840, "hidden_size": 2304},
        **{"intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27},
        **{"num_attention_heads": 32, "n_shared_experts": 1, "num_experts": 256, "num_experts_per_tok": 8},
        **{"routed_scaling_factor": 2.446, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5},
        **{"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
    },
    _ALIASES,
    dependent_flags=_dependent,
    may_be_dense=True,
    sections=delta_rules.parts_apart(_RULE),
    shapes={"self_attention.A_log": (1, 1, -1, 1)},
    respelled={r"block_sparse_moe\.(?=(gate|up|down)_proj)": "mlp."},
)
