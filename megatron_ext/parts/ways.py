"""Says which pieces of a layer each way of computing it has, and refuses the others before a run starts.

    refusals(config, {"dropout": Asked("--attention-dropout is 0.1", "--attention-dropout 0")})

A way is one that the flags choose: for attention whole sequences, documents, an exchange between context-parallel
ranks, one of the kernels; for a layer recomputation, Transformer Engine. A plugin brings its own ways to the extension
point `ways`. A piece is what a layer may
have and not every way can compute. A new piece is asked for in `Part.pieces` or `Layer.pieces`, and every way that
lacks it says so here, or the piece says it (`Asked.lacked_by`) where its kind is a plugin's; nothing is assumed:
tests/distributed/test_ways.py computes every piece in every way, or sees it refused. What a value needs of one other
flag stands at its field (`config.schema.option.Need`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron_ext.config.derived.attention_flags import chooses_nothing
from megatron_ext.config.schema import Config
from megatron_ext.registry import brought


class Asked(NamedTuple):
    """A piece that a configuration asks for."""

    text: str
    """How the flags ask for it."""

    without: str = ""
    """Flags that do without it, if that is another setting of the same model."""

    lacked_by: Mapping[str, str] = MappingProxyType({})
    """Ways that cannot compute it, by name -> why, of those that do not say it themselves (`Way.lacks`)."""


class Way(NamedTuple):
    """A way of computing a layer."""

    is_taken: Callable[[Config], bool]
    """Whether some layer is computed in this way."""

    does: str
    """Description of the way, by the flags that choose it; `{exchanges}` stands for the values of --cp-comm-type, and
    `{0.attention_backend}` for another flag of the training."""

    lacks: Mapping[str, str]
    """Pieces that it cannot compute, and why."""

    instead: str = ""
    """Flags that choose a way which can, or which to leave out, if any."""

    like: str = ""
    """Name of another way, which lacks the same pieces for the same reasons."""


def _exchanges_by(*kinds: str) -> Callable[[Config], bool]:
    """Return whether context-parallel ranks exchange keys of undivided samples in one of these ways."""

    def is_taken(config: Config) -> bool:
        layout = config.layout
        asked = layout.context_parallel_size > 1 and bool(set(kinds) & set(layout.cp_comm_type))
        return asked and not config.data.reset_attention_mask

    return is_taken


def _takes_flash_attention(config: Config, *versions: int) -> bool:
    training, backend = config.training, config.training.attention_backend
    ours = config.model.transformer_impl == "local" and chooses_nothing(config, backend) is None
    return ours and training.flash_attention_version in versions and backend not in ("fused", "unfused")


def _has_other_scores(config: Config) -> bool:
    """Return whether scores are capped, or some softmax has a sink: it is over more than products of queries and keys,
    less slopes."""
    return config.model.attention_logit_softcapping is not None or config.model.softmax_types != {"vanilla"}


_NEVER_RUN = "which was never run with {} here"
_NO_DROPOUT = {"dropout": "whose kernels have no dropout"}

WAYS: dict[str, Way] = {
    "whole": Way(lambda config: True, "attention over whole sequences", {}),
    "windows": Way(
        lambda config: config.model.window_size not in (None, "-1,0"),
        "--window-size computes attention block by block",
        _NO_DROPOUT,
    ),
    "other scores": Way(
        _has_other_scores,
        "--softmax-type or --attention-logit-softcapping computes attention block by block",
        _NO_DROPOUT,
    ),
    "documents": Way(
        lambda config: config.data.reset_attention_mask,
        "--reset-attention-mask computes attention document by document",
        _NO_DROPOUT,
    ),
    "parts": Way(
        _exchanges_by("p2p", "all_gather"),
        "--cp-comm-type {exchanges} puts attention together from blocks",
        _NO_DROPOUT,
        "--cp-comm-type a2a",
    ),
    "ring": Way(
        _exchanges_by("p2p"),
        "--cp-comm-type {exchanges} sends all keys around the ring",
        {"window": "and no rank leaves out those that a window hides"},
        "--cp-comm-type all_gather",
    ),
    "all to all": Way(_exchanges_by("a2a"), "--cp-comm-type {exchanges} exchanges heads", {}),
    "kernels of torch": Way(
        lambda config: config.training.attention_backend in ("unfused", "fused", "flash"),
        "--attention-backend {0.attention_backend} computes attention over whole sequences",
        {},
    ),
    "FlashAttention 3 and 4": Way(
        lambda config: _takes_flash_attention(config, 3, 4),
        "--flash-attention-version {0.flash_attention_version} takes FlashAttention {0.flash_attention_version}",
        _NO_DROPOUT,
        "--flash-attention-version 2",
    ),
    "Transformer Engine": Way(
        lambda config: config.model.transformer_impl == "transformer_engine",
        "--transformer-impl transformer_engine computes attention by Transformer Engine",
        {
            "window": _NEVER_RUN.format("windows"),
            "sink": _NEVER_RUN.format("sinks"),
            "cap": "which has no bound of scores",
            "slopes": _NEVER_RUN.format("slopes"),
            "gate": _NEVER_RUN.format("gates"),
            "clip": "which clips nothing",
            "parallel": "whose MLP reads what attention has added to",
            "rotation by layer": "which has one table of angles",
            "longer queries": "whose angles lengthen nothing",
            "groups by layer": "which has one number of key/value heads",
            "other values": _NEVER_RUN.format("values of another size than keys"),
            "multiplied values": "which multiplies no values",
            "temperature": "which has no factors of positions",
            "norms after": "whose layers have norms before attention and MLP alone",
            "norms of projections": "whose norms of queries and keys are over single heads, and alike",
        },
        "--transformer-impl local",
    ),
}

RECOMPUTATIONS: dict[str, Way] = {
    "attention, MLP or layers": Way(
        lambda config: config.training.recompute_granularity is not None, "recomputation computes them anew", {}
    ),
    "several layers": Way(
        lambda of: of.training.recompute_method == "uniform" and (of.training.recompute_num_layers or 1) > 1,
        "--recompute-num-layers {0.recompute_num_layers} computes several layers anew together",
        {},
        "--recompute-num-layers 1",
    ),
    "norms": Way(
        lambda config: "layernorm" in (config.training.recompute_modules or ()),
        "--recompute-modules layernorm computes anew what norms before attention and MLP give",
        {"no norms before": "and no output of other norms is kept for that"},
        "--recompute-modules core_attn",
    ),
}
"""Ways of recomputing in the backward pass. Whether they work depends on no layout: a planner asks once."""


def lacks(name: str, way: Way, piece: str, asked: Asked) -> str | None:
    """Return why the way of this name cannot compute a piece; None where it can."""
    return way.lacks.get(piece) or asked.lacked_by.get(way.like or name)


@functools.cache
def every_way() -> Mapping[str, Way]:
    """Return the ways of computing a layer by name, with those of plugins."""
    return WAYS | {name: way for ways in brought("ways") for name, way in ways.items()}


def refusals(config: Config, pieces: Mapping[str, Asked], ways: Mapping[str, Way] | None = None) -> Iterator[str]:
    """Yield why ways that the configuration takes cannot compute these pieces, each reason with a setting that
    works."""
    for name, way in (every_way() if ways is None else ways).items():
        lacking = {piece: why for piece, asked in pieces.items() if (why := lacks(name, way, piece, asked))}
        if not lacking or not way.is_taken(config):
            continue
        for piece in sorted(lacking):
            asked = pieces[piece]
            does = way.does.format(config.training, exchanges=" ".join(config.layout.cp_comm_type))
            fixes = ", or ".join(filter(None, (asked.without, way.instead)))
            yield (f"{does}, {lacking[piece]}, but {asked.text}; {'' if fixes.startswith('leave') else 'use '}{fixes}")
