"""Values that the flags of latent attention imply, and the rule for these flags next to others."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.derived.layer_patterns import ATTENTION
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.latent_attention.flags import LETTER, VARIANT, LatentAttentionFlags

_BESIDE_MAMBA = "B"
"""The other letter of attention without latents; its plugin need not be here."""


def resolve(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fill in what latent attention implies: YaRN, heads of its own sizes, and no dropout next to an indexer."""
    if LETTER in (values.get("hybrid_layer_pattern") or ""):
        values["multi_latent_attention"] = True
    if values.get("experimental_attention_variant") == VARIANT and "attention_dropout" not in given:
        values["attention_dropout"] = 0.0  # as in Megatron-LM, whose default it has no place for
    if not values.get("multi_latent_attention"):
        return
    if values.get("position_embedding_type") != "none":
        values["rope_type"] = given.get("rope_type") or "yarn"
    elif given.get("rope_type") is not None:
        values["rope_type"] = given["rope_type"]
    # Read by nothing that attends: the heads have sizes of their own.
    sizes = [values.get(name, getattr(LatentAttentionFlags, name)) for name in ("qk_head_dim", "qk_pos_emb_head_dim")]
    if given.get("kv_channels") is None:
        values["kv_channels"] = sum(sizes) if positive(*sizes) else None


def letters_are_of_latents(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a letter of attention in a model whose attention has latents."""
    letters = config.model.hybrid_layer_pattern or ""
    if not flags_of(config.model, LatentAttentionFlags).multi_latent_attention:
        return
    for letter in (ATTENTION, _BESIDE_MAMBA):
        if letter in letters:
            other = letters.replace(ATTENTION, LETTER).replace(_BESIDE_MAMBA, LETTER)
            yield (
                f"--hybrid-layer-pattern {letters} names attention, {letter}, with --multi-latent-attention, whose "
                f"letter is +; use --hybrid-layer-pattern '{other}'"
            )


RESOLVERS = (resolve,)
RULES = (letters_are_of_latents,)
