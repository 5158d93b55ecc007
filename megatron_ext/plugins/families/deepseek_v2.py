"""DeepSeek-V2, V2-Lite: deepseek_v3 with a softmax (`--moe-router-pre-softmax`) and no bias; a group counts by its best
expert (`--moe-router-group-scores 1`: Megatron counts `--moe-router-topk` / `--moe-router-group-topk` of them)."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families import latents
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import MIXTURE_NAMES, Mixture
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import keys

_MIXTURE = Mixture({}, group_scores=1, normalized=False)


def _method(reading: Reading) -> dict[str, Any]:
    method = reading.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        reading.problems.append(f"topk_method is {method}; supported are greedy and group_limited_greedy")
    of_groups = (f"moe_router_{one}" for one in ("num_groups", "group_topk", "group_scores"))
    return dict.fromkeys(of_groups) if method == "greedy" else {}  # which does not look at groups


def _method_json(config: Config) -> dict[str, Any]:
    return {"topk_method": "greedy" if config.model.moe_router_num_groups is None else "group_limited_greedy"}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {**MIXTURE_NAMES, **latents.LATENT_NAMES},
    latents.LATENT_FLAGS,
    *keys((latents.latent_values, latents.latent_json), _MIXTURE.keys, (_method, _method_json)),
    {
        **{**latents.LATENT_DEFAULTS, "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2},
        "moe_intermediate_size": 1407,
    },
    {"n_routed_experts": "num_experts"},
    dependent_flags=lambda model: {**latents.what_latents_can_say(model), **_MIXTURE.dependent_flags(model)},
    may_be_dense=True,
)
