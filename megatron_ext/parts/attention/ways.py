"""Says which pieces of attention each way of computing it has, and refuses the others before a run starts.

    refusals(config, {"dropout": Asked("--attention-dropout is 0.1", "--attention-dropout 0")})

A way of computing attention is one that the flags choose: whole sequences, documents, an exchange between
context-parallel ranks, Transformer Engine. A piece is what a layer's attention may have and not every way can compute.
A new piece is asked for in `Attention.pieces`, and every way that lacks it says so here; nothing is assumed:
tests/distributed/test_ways_of_attention.py computes every piece in every way, or sees it refused.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from megatron_ext.config.schema import Config


class Asked(NamedTuple):
    """A piece of attention that a configuration asks for."""

    text: str
    """How the flags ask for it."""

    without: str
    """Flags that do without it."""


class Way(NamedTuple):
    """A way of computing attention."""

    is_taken: Callable[[Config], bool]
    """Whether some layer is computed in this way."""

    does: str
    """What it does, by the flags that choose it; `{exchanges}` stands for the values of --cp-comm-type."""

    lacks: Mapping[str, str]
    """Pieces that it cannot compute, and why."""

    instead: str = ""
    """Flags that choose a way which can, if any."""


def _exchanges_by(*kinds: str) -> Callable[[Config], bool]:
    """Return whether context-parallel ranks exchange keys of undivided samples in one of these ways."""

    def is_taken(config: Config) -> bool:
        layout = config.layout
        asked = layout.context_parallel_size > 1 and bool(set(kinds) & set(layout.cp_comm_type))
        return asked and not config.data.reset_attention_mask

    return is_taken


_NO_DROPOUT = {"dropout": "whose kernels have no dropout"}

WAYS: dict[str, Way] = {
    "whole": Way(lambda config: True, "attention over whole sequences", {}),
    "windows": Way(
        lambda config: config.model.window_size not in (None, "-1,0"),
        "--window-size computes attention block by block",
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
    "Transformer Engine": Way(
        lambda config: config.model.transformer_impl == "transformer_engine",
        "--transformer-impl transformer_engine computes attention by Transformer Engine",
        {"window": "which was never run with windows here", "latent": "which was never run with latents here"},
        "--transformer-impl local",
    ),
}


def refusals(config: Config, pieces: Mapping[str, Asked]) -> Iterator[str]:
    """Yield why this configuration's ways of computing attention cannot compute these pieces, each with a setting that
    works."""
    for way in WAYS.values():
        lacking = pieces.keys() & way.lacks.keys()
        if not lacking or not way.is_taken(config):
            continue
        for piece in sorted(lacking):
            asked = pieces[piece]
            does = way.does.format(exchanges=" ".join(config.layout.cp_comm_type))
            fixes = ", or ".join(filter(None, (asked.without, way.instead)))
            yield f"{does}, {way.lacks[piece]}, but {asked.text}; use {fixes}"
