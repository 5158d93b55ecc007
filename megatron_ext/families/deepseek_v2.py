"""DeepSeek-V2: the attention of V3, and experts chosen by a softmax, from groups by their best expert."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import latents
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import MIXTURE_NAMES, Mixture
from megatron_ext.families.reading import Reading

_MIXTURE = Mixture({}, group_scores=1, normalized=False)


def _read(reading: Reading) -> dict[str, Any]:
    values = {**latents.latent_values(reading), **_MIXTURE.values(reading)}
    method = reading.get("topk_method", "greedy")
    if method == "greedy":  # which does not look at groups
        return {**values, **dict.fromkeys(_OF_GROUPS)}
    if method != "group_limited_greedy":
        reading.problems.append(f"topk_method is {method}; supported are greedy and group_limited_greedy")
    return values


_OF_GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores")


def _write(config: Config) -> dict[str, Any]:
    method = "greedy" if config.model.moe_router_num_groups is None else "group_limited_greedy"
    return {**latents.latent_json(config), **_MIXTURE.json(config), "topk_method": method}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {**MIXTURE_NAMES, **latents.LATENT_NAMES},
    latents.LATENT_FLAGS,
    _read,
    _write,
    {
        **{**latents.LATENT_DEFAULTS, "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2},
        "moe_intermediate_size": 1407,
    },
    {"n_routed_experts": "num_experts"},
    dependent_flags=lambda model: {**latents.what_latents_can_say(model), **_MIXTURE.dependent_flags(model)},
    may_be_dense=True,
)
