"""Jamba: pairs of letters: `S` with norms that have weights (`--scan-norm with-weights`) or `*` without positions, then
`-` or `E`, by periods and offsets; weights of experts are not normalized; a layer there is two of ours."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.plugins.families import scan_layers, shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.selective_scan.flags import SelectiveScanFlags

_KEYS = ("mamba_d_state", "mamba_d_conv", "mamba_dt_rank", "mamba_proj_bias", "mamba_conv_bias")
_UNREAD = ("use_mamba_kernels", "num_logits_to_keep", "calc_logits_for_entire_prompt", "num_experts_per_tok")


def _read(reading: Reading) -> dict[str, Any]:
    values, count = shared.decoder_values(reading), reading.integer("num_experts")
    pattern = scan_layers.read_pairs(reading, has_experts=count > 1)
    refuse_others(reading, {"mamba_inner_layernorms": True, "sliding_window": None})
    reading.understand(*_UNREAD)
    experts: dict[str, Any] = {"moe_router_topk": 2, "num_experts": None, "moe_ffn_hidden_size": None}
    if "E" in pattern:
        experts = shared.expert_values(reading, count, values["ffn_hidden_size"], normalized=False)
    return {
        **{name: value for name, value in values.items() if name not in ("rotary_base", "rope_type")},
        **{**scan_layers.scan_values(reading, *_KEYS), "moe_router_pre_softmax": "E" in pattern, **experts},
        "scan_channels": reading.integer("mamba_expand", 2) * reading.integer("hidden_size"),
        **{"num_layers": 2 * reading.integer("num_hidden_layers"), "hybrid_layer_pattern": pattern},
    }


def _write(config: Config) -> dict[str, Any]:
    model, content = config.model, {**shared.decoder_json(config), **shared.expert_json(config)}
    rest = {**scan_layers.write_pairs(model), **scan_layers.scan_json(config, *_KEYS), "mamba_expand": _expand(model)}
    rest |= {"num_experts": model.num_experts or 1, "num_hidden_layers": model.num_layers // 2, "pad_token_id": None}
    return {key: value for key, value in content.items() if key not in ("rope_theta", "rope_scaling")} | rest


def _expand(model: ModelConfig) -> int:
    return max((flags_of(model, SelectiveScanFlags).scan_channels or 0) // model.hidden_size, 1)


def _dependent(model: ModelConfig) -> dict[str, Any]:
    of_experts = {"moe_router_pre_softmax": True, "moe_ffn_hidden_size": model.ffn_hidden_size}
    experts = of_experts if model.num_experts is not None else {}
    sizes = {"scan_channels": _expand(model) * model.hidden_size}
    return {"hybrid_layer_pattern": scan_layers.pairs_in_turn(model), **sizes, **experts}


JAMBA = Family(
    "jamba",
    "JambaForCausalLM",
    {
        **shared.expert_names("feed_forward", gate="gate_proj", up="up_proj", down="down_proj"),
        **{"mlp.router": ("feed_forward.router",), "mlp.linear_fc2": ("feed_forward.down_proj",)},
        **{"mlp.linear_fc1": ("feed_forward.gate_proj", "feed_forward.up_proj"), **scan_layers.scan_names("mamba")},
        **{"pre_mlp_layernorm": ("pre_ff_layernorm",), "decoder.final_layernorm": ("model.final_layernorm",)},
    },
    {**shared.DECODER_FLAGS, **scan_layers.WITHOUT_POSITIONS, "scan_norm": "with-weights"},
    *(_read, _write, scan_layers.OF_JAMBA, {"num_experts": "num_local_experts"}),
    dependent_flags=_dependent,
    may_be_dense=True,
    halves=True,
    sections=scan_layers.SCAN_SECTIONS,
)
