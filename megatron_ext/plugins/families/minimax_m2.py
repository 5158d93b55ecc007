"""MiniMax-M2: `--moe-router-score-function sigmoid --moe-router-enable-expert-bias`; a share of the channels rotated
(`rotary_dim`), norms of queries and keys over all heads of a token."""

from typing import Any

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import BIASED_SIGMOID
from megatron_ext.plugins.families.reading import Reading

_ONE_FORM = {
    **{"router_jitter_noise": 0.0, "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"},
    **{"use_routing_bias": True, "shared_intermediate_size": 0},
}


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading, partial=True)
    rotated = reading.get("rotary_dim")
    if rotated is not None and "rotary_percent" in values:  # of files before transformers 5
        head = values["kv_channels"]
        share = reading.integer("rotary_dim") / head
        if values["rotary_percent"] not in (1.0, share) and reading.is_readable:
            reading.problems.append(
                f"partial_rotary_factor is {values['rotary_percent']:g}, but rotary_dim is {rotated} of {head}"
            )
        if share > 1.0 and reading.is_readable:
            reading.problems.append(f"rotary_dim is {rotated}, above the {head} channels of a head")
        values["rotary_percent"] = share
    kinds = reading.get("attn_type_list", [1])
    if not isinstance(kinds, list) or {*map(str, kinds)} != {"1"}:
        reading.problems.append("attn_type_list has other layers than 1: attention over all positions alone is known")
    reading.understand("use_mtp", "num_mtp_modules", "mtp_transformer_layers")  # left out, as in transformers
    return values


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    {
        **shared.expert_names("block_sparse_moe", gate="w1", up="w3", down="w2"),
        EXPERT_BIAS: ("block_sparse_moe.e_score_correction_bias",),
    },
    {
        **{**shared.DECODER_FLAGS, "qk_layernorm": True, "qk_layernorm_over": "projection"},
        **{"disable_bias_linear": True, "moe_router_pre_softmax": False, **BIASED_SIGMOID},
    },
    *shared.keys(
        (_read, lambda config: shared.decoder_json(config, partial=True)),
        shared.in_one_form(_ONE_FORM),
        shared.LOCAL_EXPERTS,
    ),
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0, "max_position_embeddings": 196608},
        **{"num_local_experts": 256, "num_experts_per_tok": 8},
    },
    aliases={"num_local_experts": "num_experts"},
)
