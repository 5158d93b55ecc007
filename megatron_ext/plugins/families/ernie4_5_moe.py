"""ERNIE 4.5, experts: a softmax with `--moe-router-enable-expert-bias`, which Megatron does not have; shared experts;
the layers with experts follow each other."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import MIXTURE_NAMES, consecutive_mixtures, shared_experts
from megatron_ext.plugins.families.reading import Reading

_OF_TRAINING = ("moe_capacity", "moe_gate", "moe_use_aux_free", "moe_norm_min")


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading)
    first, step = reading.integer("moe_layer_start_index", 1, least=0), reading.integer("moe_layer_interval", 1)
    numbers, last = shared.layer_numbers(reading), reading.get("moe_layer_end_index", -1)
    last = len(numbers) - 1 if last == -1 else reading.integer("moe_layer_end_index", least=0)
    mixtures = [(number + 1) % step == 0 and first <= number <= last for number in numbers]
    if not any(mixtures) and reading.is_readable:
        reading.problems.append("moe_layer_start_index, moe_layer_end_index and moe_layer_interval leave no experts")
    experts, width = reading.integer("moe_num_experts"), reading.integer("moe_intermediate_size")
    values |= shared.expert_values(reading, experts, width, normalized=True)
    values["moe_shared_expert_intermediate_size"] = reading.integer("moe_num_shared_experts", least=0) * width or None
    shared.refuse_others(reading, {"use_bias": False})
    reading.understand(*_OF_TRAINING)
    return {**values, "moe_layer_freq": None if all(mixtures) else shared.pattern(mixtures)}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    has = [layer.number for layer in layers(config) if layer.experts is not None]
    return {
        **{**shared.decoder_json(config), **shared.NO_PADDING, "use_bias": False, "moe_k": model.moe_router_topk},
        **{"moe_num_experts": model.num_experts, "moe_intermediate_size": model.expert_ffn_hidden_size},
        **{"moe_layer_start_index": has[0], "moe_layer_end_index": has[-1], "moe_layer_interval": 1},
        "moe_num_shared_experts": shared_experts(model),
    }


ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    {**MIXTURE_NAMES, EXPERT_BIAS: ("mlp.moe_statics.e_score_correction_bias",)},
    {
        **{**shared.DECODER_FLAGS, "rotary_interleaved": True, "disable_bias_linear": True},
        **{"moe_router_enable_expert_bias": True, "moe_router_pre_softmax": False},
    },
    _read,
    _write,
    {
        **{"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        **{"max_position_embeddings": 131072, "moe_num_experts": 64, "num_experts_per_tok": 6},
        **{"moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
    },
    aliases={"num_experts_per_tok": "moe_k", "moe_num_experts": "num_experts"},
    dependent_flags=lambda model: consecutive_mixtures(model, to_the_end=False),
    transposed=frozenset({EXPERT_BIAS}),
    dropouts=(),
)
