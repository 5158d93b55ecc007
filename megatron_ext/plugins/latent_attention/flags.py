"""The flags of latent attention and of indexers that choose its keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.schema.option import Choice, Need, ReadWith, option

LETTER = "+"
"""Its letter in --hybrid-layer-pattern."""

VARIANT = "dsa"
"""Value of --experimental-attention-variant that gives latent attention an indexer."""

_CHOICE = ReadWith(
    "experimental_attention_variant",
    "without --experimental-attention-variant dsa no indexer chooses keys",
    only=(VARIANT,),
)
_LATENTS = ReadWith("multi_latent_attention", "without --multi-latent-attention there are no latents")


@dataclass(frozen=True)
class LatentAttentionFlags:
    """Options of latent attention and of its indexer."""

    multi_latent_attention: bool = option(
        False,
        "Multi-head latent attention: keys and values of all heads out of one small vector of each token.",
        resume="shape",
        computed_by_ours=True,
        needs={
            True: [
                Need("rotary_percent", 1.0, "all of --qk-pos-emb-head-dim rotated"),
                Need("rotary_interleaved", False, "its own rotation, of neighbouring channels"),
                Need("use_rope_scaling", False, "--rope-type yarn to stretch the frequencies"),
                Need("group_query_attention", False, "keys and values of its own for every head"),
                Need("add_qkv_bias", False, "projections without bias"),
                Need("qk_layernorm_over", "head", "norms over its latents"),
                Need("qk_layernorm_place", "before", "norms over its latents"),
                Need("qk_l2_norm", False, "norms over its latents"),
                Need("use_mup", False, "matrices that do not all grow with the hidden size"),
            ]
        },
    )
    q_lora_rank: int | None = option(
        None,
        "MLA: channels of the latent that queries are projected from; default: queries are projected from the "
        "hidden states.",
        resume="shape",
        at_least=1,
        read_with=_LATENTS,
        dropped_unread=True,
    )
    kv_lora_rank: int = option(
        32,
        "MLA: channels of the latent that keys and values are projected from.",
        resume="shape",
        at_least=1,
        read_with=_LATENTS,
        dropped_unread=True,
    )
    qk_head_dim: int = option(
        128,
        "MLA: channels per query and key head without RoPE.",
        resume="shape",
        at_least=1,
        read_with=_LATENTS,
        dropped_unread=True,
    )
    qk_pos_emb_head_dim: int = option(
        64,
        "MLA: channels per head that get RoPE; the key's are shared by all heads.",
        resume="shape",
        at_least=1,
        read_with=_LATENTS,
        dropped_unread=True,
    )
    v_head_dim: int = option(
        128, "MLA: channels per value head.", resume="shape", at_least=1, read_with=_LATENTS, dropped_unread=True
    )
    latent_norm_epsilon: float | None = option(
        None,
        "MLA: epsilon of the norms of latents; default --norm-epsilon.",
        resume="function",
        positive=True,
        read_with=(_LATENTS, ReadWith("qk_layernorm", "without --qk-layernorm there are no such norms")),
        dropped_unread=True,
    )
    dsa_indexer_n_heads: int | None = option(
        None,
        "DSA indexer (--experimental-attention-variant dsa): number of query heads.",
        resume="shape",
        at_least=1,
        read_with=_CHOICE,
    )
    dsa_indexer_head_dim: int | None = option(
        None, "DSA indexer: channels of each query head and of the key.", resume="shape", at_least=1, read_with=_CHOICE
    )
    dsa_indexer_topk: int | None = option(
        None, "DSA indexer: number of keys chosen for each query.", resume="function", at_least=1, read_with=_CHOICE
    )
    dsa_indexer_rope_interleaved: bool = option(
        False,
        "DSA indexer: rotate neighbouring channels in pairs, as GLM-5 does, instead of halves, as DeepSeek-V3.2 does.",
        resume="function",
        read_with=_CHOICE,
    )
    dsa_indexer_k_norm_epsilon: float | None = option(
        None,
        "DSA indexer: epsilon of the LayerNorm of keys; default --norm-epsilon.",
        resume="function",
        positive=True,
        read_with=_CHOICE,
    )
    dsa_indexer_loss_coeff: float = option(
        1.0,
        "DSA indexer: coefficient of its loss, the divergence of the indexer's distribution over keys from "
        "attention's; nothing else trains the indexer.",
        resume="free",
        positive=True,
        read_with=_CHOICE,
    )
    dsa_indexer_use_sparse_loss: bool = option(
        False,
        "DSA indexer: compute its loss over the chosen keys instead of all keys.",
        resume="free",
        read_with=_CHOICE,
    )
    dsa_indexer_warmup: bool = option(
        False,
        "DSA indexer: dense warm-up: attend to all keys while the indexer learns. To train the indexer alone, add "
        "--lr-group *=0 --lr-group *.indexer.*=1.",
        resume="free",
        read_with=_CHOICE,
    )


def counts_as(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that count as given next to latent attention: its rotary positions, stretched by YaRN."""
    if not values.get("multi_latent_attention") or values.get("position_embedding_type") == "none":
        return {}
    return {"position_embedding_type": "rope", "rope_type": values.get("rope_type") or "yarn"}


FLAGS = (("model", LatentAttentionFlags),)
CHOICES = (
    Choice("hybrid_layer_pattern", LETTER, words="attention of latents"),
    Choice(
        "experimental_attention_variant", VARIANT, (Need("multi_latent_attention", True, "latents of keys and values"),)
    ),
)
COUNTS_AS = (counts_as,)
