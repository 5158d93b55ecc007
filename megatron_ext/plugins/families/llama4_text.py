"""Llama 4: one sigmoid expert (`--moe-apply-probs-on-input`) and a shared one, in all layers or some; `--qk-l2-norm`,
layers that rotate nothing and their `--attention-temperature-scale`; sequences of one `--attention-chunk-size`."""

import json
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading

_SHARED = "feed_forward.shared_expert"
_NAMES = {
    **shared.stacked_names("feed_forward"),
    "mlp.linear_fc1": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.linear_fc2": ("feed_forward.down_proj",),
    "mlp.shared_experts.linear_fc1": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
    "mlp.shared_experts.linear_fc2": (f"{_SHARED}.down_proj",),
}
_KINDS = ("full_attention", "chunked_attention")


def _read(reading: Reading) -> dict[str, Any]:
    numbers = shared.layer_numbers(reading)
    step = reading.integer("interleave_moe_layer_step", 1)
    mixtures = reading.integers("moe_layers", len(numbers), numbers[step - 1 :: step])
    if not mixtures and reading.is_readable:
        reading.problems.append("moe_layers, or interleave_moe_layer_step, leave no layer with experts")
    kinds = [_KINDS[one] for one in shared.rotating_layers(reading)]
    reading.refuse_unless("layer_types", kinds, kinds, f"but by no_rope_layers it is {json.dumps(kinds)[:80]}")
    heated, scale = reading.get("attn_temperature_tuning", True), reading.number("attn_scale", 0.1)
    if not isinstance(heated, int):  # in published files a number stands for true
        reading.problems.append(f"attn_temperature_tuning is {json.dumps(heated)[:80]}, and neither true nor false")
    chunk, width = reading.get("attention_chunk_size"), reading.integer("intermediate_size")
    has = [number in mixtures for number in numbers]
    return {
        **shared.decoder_values(reading, biases="attention"),
        "ffn_hidden_size": reading.integer("intermediate_size_mlp"),
        "num_experts": reading.integer("num_local_experts"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
        "moe_layer_freq": None if all(has) else shared.pattern(has),
        "attention_temperature_scale": scale if heated else None,
        "attention_temperature_step": float(reading.integer("floor_scale", 8192)),
        "attention_chunk_size": None if chunk is None else reading.integer("attention_chunk_size"),
    }


def _write(config: Config) -> dict[str, Any]:
    model, heat = config.model, config.model.attention_temperature_scale
    return {
        **{**shared.decoder_json(config, biases="attention"), **shared.expert_json(config), **shared.NO_PADDING},
        **{"intermediate_size": model.expert_ffn_hidden_size, "intermediate_size_mlp": model.ffn_hidden_size},
        "num_local_experts": model.num_experts,
        "moe_layers": [layer.number for layer in layers(config) if layer.experts is not None],
        "attention_chunk_size": model.attention_chunk_size,
        **{"attn_temperature_tuning": heat is not None, "attn_scale": heat or 0.1},
        "floor_scale": int(model.attention_temperature_step),
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {
        **shared.biases_of_attention(model),
        "moe_shared_expert_intermediate_size": model.expert_ffn_hidden_size,
        "attention_temperature_step": max(model.attention_temperature_step // 1, 1.0),
    }


LLAMA4_TEXT = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    _NAMES,
    {
        **{**shared.DECODER_FLAGS, "rotary_interleaved": True, "disable_bias_linear": True},
        **{"moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
    },
    *shared.keys(
        shared.in_one_form({"num_experts_per_tok": 1}),
        shared.understood("router_jitter_noise", "for_llm_compressor"),
        (_read, _write),
        shared.FIXED_LAYERS,
        shared.switch("use_qk_norm", "qk_l2_norm", True),
    ),
    {
        **{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
        **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
        **{"num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_chunk_size": 8192},
        "max_position_embeddings": 131072,
    },
    dependent_flags=_dependent_flags,
    transposed=shared.STACKED_TRANSPOSED,
)
