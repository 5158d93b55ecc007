"""Aria, its text model: experts and shared ones in every layer; an expert's matrices are one tensor and transposed."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import mixtures, shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading

_SHARED = "moe_shared_expert_intermediate_size"
_EXPERTS = {f"mlp.experts.linear_fc{one}": (f"mlp.experts.fc{one}",) for one in (1, 2)}


def _read(reading: Reading) -> dict[str, Any]:
    width, experts = reading.integer("intermediate_size"), reading.integer("moe_num_experts")
    count = reading.integer("moe_num_shared_experts")
    return {**shared.expert_values(reading, experts, width, normalized=True), _SHARED: count * width}


def _write(config: Config) -> dict[str, Any]:
    model, width = config.model, config.model.expert_ffn_hidden_size
    content = {**shared.expert_json(config), **shared.NO_PADDING, "intermediate_size": width}
    counts = {"moe_num_experts": model.num_experts, "moe_num_shared_experts": mixtures.shared_experts(model)}
    return {**content, **counts}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    width = {_SHARED: max(mixtures.shared_experts(model), 1) * model.expert_ffn_hidden_size}
    return {**shared.biases_of_attention(model), **(width if model.num_experts else {})}


ARIA_TEXT = Family(
    "aria_text",
    "AriaTextForCausalLM",
    {
        **{name: theirs for name, theirs in mixtures.MIXTURE_NAMES.items() if not name.startswith("mlp.linear_")},
        **{**_EXPERTS, "mlp.router": ("mlp.router",)},
    },
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_router_pre_softmax": False},
    *shared.keys(shared.decoder(biases="attention"), shared.in_one_form({"mlp_bias": False}), (_read, _write)),
    {"intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
    renamed={"num_experts_per_tok": "moe_topk"},
    dependent_flags=_dependent_flags,
    transposed=frozenset(_EXPERTS),
    is_seldom=True,
)
