"""DeepSeek's models, from DeepSeek-V2 to V3.2."""

from functools import partial
from itertools import starmap
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import latents, shared
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import AHEAD, BIASED_MIXTURE, MIXTURE_NAMES, Mixture, first_typed, typed_json
from megatron_ext.families.reading import Reading

# DeepSeek-V2: the attention of V3, and experts chosen by a softmax, from groups by their best expert.
_MIXTURE_DEEPSEEK_V2 = Mixture({}, group_scores=1, normalized=False)


def _read_deepseek_v2(reading: Reading) -> dict[str, Any]:
    values = {**latents.latent_values(reading), **_MIXTURE_DEEPSEEK_V2.values(reading)}
    method = reading.get("topk_method", "greedy")
    if method == "greedy":  # which does not look at groups
        return {**values, **dict.fromkeys(_OF_GROUPS)}
    if method != "group_limited_greedy":
        reading.problems.append(f"topk_method is {method}; supported are greedy and group_limited_greedy")
    return values


_OF_GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores")


def _write_deepseek_v2(config: Config) -> dict[str, Any]:
    method = "greedy" if config.model.moe_router_num_groups is None else "group_limited_greedy"
    return {**latents.latent_json(config), **_MIXTURE_DEEPSEEK_V2.json(config), "topk_method": method}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {**MIXTURE_NAMES, **latents.LATENT_NAMES},
    latents.LATENT_FLAGS,
    _read_deepseek_v2,
    _write_deepseek_v2,
    {
        **{**latents.LATENT_DEFAULTS, "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2},
        "moe_intermediate_size": 1407,
    },
    {"n_routed_experts": "num_experts"},
    dependent_flags=lambda model: {
        **latents.what_latents_can_say(model),
        **_MIXTURE_DEEPSEEK_V2.dependent_flags(model),
    },
    may_be_dense=True,
)


# DeepSeek-V3: multi-head latent attention, and experts chosen by a sigmoid with a bias from groups of them.
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {**MIXTURE_NAMES, **latents.LATENT_NAMES, **shared.NEXT_TOKEN_NAMES},
    latents.LATENT_FLAGS,
    *shared.keys((latents.latent_values, latents.latent_json), BIASED_MIXTURE.keys, AHEAD),
    {
        **{**latents.LATENT_DEFAULTS, "max_position_embeddings": 4096, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    },
    {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    dependent_flags=lambda model: {
        **latents.what_latents_can_say(model),
        **BIASED_MIXTURE.dependent_flags(model),
    },
    is_common=True,
    may_be_dense=True,
    other_names=("kimi_k2",),  # whose files name the same class
)


# DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the keys that an indexer chooses.
_epsilon = partial(shared.own_epsilon, "dsa_indexer_k_norm_epsilon", 1e-6)

_SIZES = {f"index_{one}": f"dsa_indexer_{one}" for one in ("n_heads", "head_dim", "topk")}
_INDEXER = {"linear_wq_b": "wq_b", "linear_wk": "wk", "k_norm": "k_norm", "linear_weights_proj": "weights_proj"}


def _read_deepseek_v32(reading: Reading) -> dict[str, Any]:
    first = first_typed(reading, reading.integer("first_k_dense_replace", least=0))
    attention = ["indexed_attention"] * len(shared.layer_numbers(reading))
    reading.refuse_unless("layer_types", attention, attention, "only indexed_attention in every layer is supported")
    values = {**latents.latent_values(reading), **BIASED_MIXTURE.values(reading, first)}
    if values["q_lora_rank"] is None:
        reading.problems.append("q_lora_rank is null, but the indexer reads the latents of queries")
    return {**values, **_epsilon(values["norm_epsilon"])}


def _dependent_flags_deepseek_v32(model: ModelConfig) -> dict[str, Any]:
    return {**DEEPSEEK_V3.dependent_flags(model), **_epsilon(model.norm_epsilon)}


DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    {
        **DEEPSEEK_V3.names,
        **{
            f"self_attention.core_attention.indexer.{ours}": (f"self_attn.indexer.{theirs}",)
            for ours, theirs in _INDEXER.items()
        },
    },
    {**latents.LATENT_FLAGS, "experimental_attention_variant": "dsa"},
    *shared.keys(
        (
            _read_deepseek_v32,
            lambda config: {**latents.latent_json(config), **BIASED_MIXTURE.json(config), **typed_json(config)},
        ),
        AHEAD,
        *starmap(shared.size, _SIZES.items()),
    ),
    {
        **{**DEEPSEEK_V3.defaults, "max_position_embeddings": 163840},
        **{"index_n_heads": 64, "index_topk": 2048, "index_head_dim": 128},
    },
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=_dependent_flags_deepseek_v32,
    may_be_dense=True,
)
