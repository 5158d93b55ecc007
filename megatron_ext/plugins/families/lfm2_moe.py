"""LFM2 with experts: lfm2 with experts chosen by a sigmoid, with a bias or without, after `num_dense_layers`;
`norm_topk_prob` false is `--moe-router-unnormalized`."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.lfm2 import LFM2, LFM2_KEYS
from megatron_ext.plugins.families.mixtures import UNNORMALIZED, consecutive_mixtures
from megatron_ext.plugins.families.reading import Reading

_NAMES = {
    **{**shared.expert_names("feed_forward", gate="w1", up="w3", down="w2"), **LFM2.names},
    EXPERT_BIAS: ("feed_forward.expert_bias",),
}


def _read(reading: Reading) -> dict[str, Any]:
    first, numbers = reading.integer("num_dense_layers", 2, least=0), shared.layer_numbers(reading)
    if first >= len(numbers) and reading.is_readable:
        reading.problems.append(f"num_dense_layers {first} leave none of num_hidden_layers {len(numbers)} experts")
    sums = reading.boolean("norm_topk_prob", True)
    count, width = reading.integer("num_experts"), reading.integer("moe_intermediate_size")
    scale = reading.number("routed_scaling_factor", 1.0)
    values = shared.expert_values(reading, count, width, normalized=sums)
    return {
        **{**values, "moe_router_pre_softmax": False, UNNORMALIZED: not sums and values["moe_router_topk"] > 1},
        "moe_router_enable_expert_bias": reading.boolean("use_expert_bias", True),
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
        "moe_layer_freq": None if first == 0 else shared.pattern([number >= first for number in numbers]),
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **{
            **shared.expert_json(config),
            "num_experts": model.num_experts,
            "norm_topk_prob": not model.moe_router_unnormalized,
        },
        **{
            "moe_intermediate_size": model.expert_ffn_hidden_size,
            "use_expert_bias": model.moe_router_enable_expert_bias,
        },
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "num_dense_layers": [layer.experts is not None for layer in layers(config)].index(True),
    }


LFM2_MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    _NAMES,
    {**LFM2.flags, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False},
    *shared.keys(LFM2_KEYS, (_read, _write)),
    {
        **{**LFM2.defaults, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 32},
        **{"moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4},
    },
    aliases={"tie_word_embeddings": "tie_embedding", "num_experts": "num_local_experts"},
    dependent_flags=lambda model: {**LFM2.dependent_flags(model), **consecutive_mixtures(model, to_the_end=True)},
    dropouts=(),
    sections=LFM2.sections,
)
