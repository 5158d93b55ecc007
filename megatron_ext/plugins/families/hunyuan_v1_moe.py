"""Hunyuan, experts: hunyuan_v1_dense with experts and a shared one of the same width; `moe_topk` is one number of all
layers."""

import json
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.hunyuan_v1_dense import HUNYUAN
from megatron_ext.plugins.families.reading import Reading

_MLP = ("gate_proj", "up_proj", "down_proj")
_SHARED = "mlp.shared_mlp"
_USED = "num_experts_per_tok"


def _read(reading: Reading) -> dict[str, Any]:
    used, number = reading.get(_USED), len(shared.layer_numbers(reading))
    if isinstance(used, list):  # of each layer
        if len(used) != number or any(one != used[0] for one in used):
            words = f"supported is one number of all {number} layers"
            reading.problems.append(f"{_USED} is {json.dumps(used)[:60]}; {words}")
        here = [key for key in (_USED, "moe_topk") if key in reading.content]
        reading = reading.changed(**dict.fromkeys(here, used[0] if used else 1))
    values, width = shared.decoder_values(reading, alpha=True, biases="attention"), reading.integer("intermediate_size")
    values |= shared.expert_values(reading, reading.integer("num_experts", 1), width, normalized=True)
    reading.understand("eod_token_id", "sep_token_id")
    return {**values, "moe_shared_expert_intermediate_size": width}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    content = {**shared.decoder_json(config, biases="attention"), **shared.expert_json(config), **shared.NO_PADDING}
    return {**content, "num_experts": model.num_experts, "intermediate_size": model.expert_ffn_hidden_size}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    widths = {"moe_shared_expert_intermediate_size": model.expert_ffn_hidden_size} if model.num_experts else {}
    return {**shared.biases_of_attention(model), **widths}


HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    {
        **{name: theirs for name, theirs in HUNYUAN.names.items() if not name.startswith("mlp.")},
        **{"mlp.router": ("mlp.gate.wg",), "mlp.experts.linear_fc2": (f"mlp.experts.{{}}.{_MLP[2]}",)},
        "mlp.experts.linear_fc1": tuple(f"mlp.experts.{{}}.{one}" for one in _MLP[:2]),
        "mlp.shared_experts.linear_fc1": tuple(f"{_SHARED}.{one}" for one in _MLP[:2]),
        "mlp.shared_experts.linear_fc2": (f"{_SHARED}.{_MLP[2]}",),
    },
    {**HUNYUAN.flags, "moe_router_pre_softmax": False},
    _read,
    _write,
    {**HUNYUAN.defaults, _USED: 1},
    aliases={"num_experts": "num_local_experts", _USED: "moe_topk"},
    dependent_flags=_dependent_flags,
    is_seldom=True,
)
