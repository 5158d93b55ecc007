"""Keys that an indexer chooses, on tensor- and context-parallel ranks, against whole samples in one process, in fp64:
in fp32 a product may round to either side of 0 from one layout to the next, where ReLU has two gradients."""

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.data.packing import documents_of
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parts.attention.cached import Sequences
from megatron_ext.plugins.latent_attention import indexer
from tests.support.several_models import in_turn
from tests.support.small_models import INDEXED, build_small_model, small_config

# Of the second tier: a row of tests/parity/test_matrix.py chooses keys.
pytestmark = pytest.mark.full

LENGTH, ROWS, HIDDEN = 32, 2, 64
EOD = 7
SIZES = {**INDEXED, "seq_length": LENGTH, "max_position_embeddings": LENGTH, "dsa_indexer_head_dim": 12}

TP2, SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2, "cp_comm_type": ("all_gather",)}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, TP2),
    "TP2 SP": (2, {**TP2, **SP}),
    "CP2": (2, CP2),
    "TP2 SP CP2": (4, {**TP2, **SP, **CP2}),
}
CASES = list(itertools.product((False, True), (False, True)))
"""Whether rows are of several documents, and whether the indexer learns from the chosen keys alone."""


def _whole(world: int, flags: dict[str, Any], case: tuple[bool, bool]) -> dict[str, torch.Tensor]:
    """Return the gradients of the attention of a layer, put together from those of all ranks, and its output of this
    context-parallel rank's positions."""
    packed, sparse = case
    config = small_config({**SIZES, "dsa_indexer_use_sparse_loss": sparse}, {"world_size": world, **flags})
    [gpt], groups = build_small_model(config)
    layer: Any = gpt.decoder.layers[0].self_attention.double()
    rotary: Any = gpt.rotary_pos_emb
    generator = torch.Generator().manual_seed(1)
    hidden, pull = (torch.randn(LENGTH, ROWS, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2))
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    tokens[0, 5], tokens[0, 17], tokens[1, 11] = [EOD] * 3
    place = groups.cp.rank(), groups.cp.size()

    def part(of: torch.Tensor) -> torch.Tensor:
        chunks = of.chunk(2 * place[1])
        return torch.cat([chunks[index] for index in context_chunks(*place)])

    def joined(of: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(of) for _ in range(groups.tp.size())]
        torch.distributed.all_gather(parts, of.contiguous(), group=groups.tp)
        return torch.cat(parts, dim=dim)

    hidden, pull = part(hidden), part(pull)
    if divided := config.layout.sequence_parallel:
        hidden, pull = (one.chunk(groups.tp.size())[groups.tp.rank()] for one in (hidden, pull))
    hidden = hidden.contiguous().requires_grad_()
    table = rotary.at(part(torch.arange(LENGTH))[None]).double()
    output = layer(hidden, None, table, Sequences(documents_of(tokens, EOD, *place)) if packed else None)[0]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    of_hidden, *gradients = torch.autograd.grad((output * pull).sum(), (hidden, *parameters))
    found = {"output": output.detach(), "input": of_hidden}
    if divided:
        found = {name: joined(one, 0) for name, one in found.items()}
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=groups.tp)
        torch.distributed.all_reduce(gradient, group=groups.cp)
        sharded = getattr(parameter, "tensor_model_parallel", False)
        found[name] = joined(gradient, parameter.partition_dim) if sharded else gradient
    return found


def _each(layout: str, fault: Callable[[], None] | None) -> list[dict[str, torch.Tensor]]:
    if fault is not None:
        fault()
    return in_turn(partial(_whole, *LAYOUTS[layout]), CASES)


@functools.cache
def _reference() -> list[dict[str, torch.Tensor]]:
    [reference] = run_ranks(1, in_turn, partial(_whole, 1, {}), CASES)
    return reference


def _differences(layout: str, fault: Callable[[], None] | None = None) -> list[dict[str, float]]:
    """Return the largest difference from one process on any rank, over the largest number, of each case."""
    size, flags = LAYOUTS[layout]
    context = flags.get("context_parallel_size", 1)
    differences: list[dict[str, float]] = [{} for _ in CASES]
    for rank, of_rank in enumerate(run_ranks(size, _each, layout, fault)):
        for known, found, worst in zip(_reference(), of_rank, differences, strict=True):
            for name, expected in known.items():
                if name in ("output", "input"):
                    chunks = expected.chunk(2 * context)
                    place = rank // flags.get("tensor_model_parallel_size", 1)
                    expected = torch.cat([chunks[index] for index in context_chunks(place, context)])
                off = ((found[name] - expected).abs().max() / expected.abs().max()).item()
                worst[name] = max(worst.get(name, 0.0), off)
    return differences


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradients_are_those_of_one_process(layout: str) -> None:
    for case, differences in zip(CASES, _differences(layout), strict=True):
        assert max(differences.values()) < 1e-10, (case, differences)


def _learns_from_own_heads() -> None:
    target = indexer._target
    alone: Any = type("Alone", (), {"size": lambda _: 1})()
    indexer._target = lambda *arguments: target(*arguments[:-1], alone)  # pyright: ignore[reportCallIssue]


def _chooses_by_half_of_the_heads() -> None:
    scores = indexer.index_scores

    def of_half(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = torch.arange(weights.size(-1)) % 2 == torch.distributed.get_rank() % 2
        return scores(query, key, weights * own)

    indexer.index_scores = of_half


@pytest.mark.parametrize("fault", [_learns_from_own_heads, _chooses_by_half_of_the_heads])
def test_the_heads_of_all_ranks_are_needed(fault: Callable[[], None]) -> None:
    for case, differences in zip(CASES, _differences("TP2", fault), strict=True):
        assert max(differences.values()) > 1e-3, (case, differences)
