"""A rank's seed of dropout, and what it reads of its samples, on ranks that this process plays."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rehearsed_world import played
from megatron_ext import device
from megatron_ext.config.schema import Config
from megatron_ext.data.corpus import Splits
from megatron_ext.parallel import groups
from megatron_ext.train.build import build_loaders, seed_dropout
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import Extensions
from megatron_ext.train.run import Loaders
from tests.support.small_models import small_config
from tests.support.small_runs import MODEL, built


def _seed(rank: int, layout: dict[str, int], seed: int = 5) -> int:
    world = 8
    config = small_config(layout={"world_size": world, **layout}, training={"seed": seed})
    with played(rank, world):
        seed_dropout(config, groups.initialize(config.layout, device.install("cpu")))
        return torch.initial_seed()


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
        {"pipeline_model_parallel_size": 4},
    ],
)
def test_each_rank_draws_a_dropout_of_its_own_but_tensor_parallel_ranks(layout: dict[str, int]) -> None:
    """What they hold whole gets one mask; the engine makes another seed of the rank for what they divide."""
    tensor = layout.get("tensor_model_parallel_size", 1)
    seeds = [_seed(rank, layout) for rank in range(8)]
    assert all(len(set(seeds[first : first + tensor])) == 1 for first in range(0, 8, tensor))
    assert len(set(seeds)) == 8 // tensor
    assert not set(seeds) & {_seed(rank, layout, seed=6) for rank in range(0, 8, tensor)}


def test_what_tensor_parallel_ranks_divide_has_masks_of_their_own() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = []
    for rank in range(2):
        config = small_config(layout={"world_size": 2, "tensor_model_parallel_size": 2})
        with played(rank, 2):
            seed_dropout(config, groups.initialize(config.layout, device.install("cpu")))
            tracker: Any = get_cuda_rng_tracker()
            states.append({name: state.clone() for name, state in tracker.get_states().items()})
    equal = {name: torch.equal(state, states[1][name]) for name, state in states[0].items()}
    assert not equal["model-parallel-rng"]
    assert any(equal.values()), "what they hold whole"


EOD = 63


class Documents:
    """Samples of 16 tokens, in which a document ends after every fifth one; sample i consists of tokens 10 + i."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        tokens = np.full(16, 10 + index % 50)
        tokens[4::5] = EOD
        return {
            "tokens": tokens,
            "labels": tokens,
            "loss_mask": np.ones(16, np.float32),
            "position_ids": np.arange(16),
        }


@contextmanager
def _loaders(flags: str, rank: int = 0, world: int = 1) -> Iterator[tuple[Loaders, Config]]:
    """Return a context with the loaders of a rank."""
    words = [*MODEL, *f"--tokenizer-type NullTokenizer --world-size {world} {flags}".split()]
    own: Any = Extensions(datasets=lambda *_: Splits(Documents(), Documents(), None))
    with played(rank, world):
        config = configure(words).config
        here = device.install("cpu")
        loaders = build_loaders(config, here, groups.initialize(config.layout, here), extensions=own)
        try:
            yield loaders, config
        finally:
            loaders.close()


def _samples(tokens: torch.Tensor) -> list[int]:
    return [int(row[0]) - 10 for row in tokens]


def test_each_replica_reads_its_own_samples_and_each_stage_what_it_needs() -> None:
    """Two stages, two replicas: the first stage reads tokens, the last one labels."""
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 8"
    for rank, (stage, replica) in enumerate(itertools.product(range(2), range(2))):
        with _loaders(flags, rank, 4) as (loaders, _):
            batches = loaders.train.global_batch(8, 2)
            read = [one.labels if stage else one.tokens for one in batches]
            others = [one.tokens if stage else one.labels for one in batches]
        assert others == [None, None]
        found = [sample for tokens in read if tokens is not None for sample in _samples(tokens)]
        assert found == [8 + 2 * replica, 9 + 2 * replica, 12 + 2 * replica, 13 + 2 * replica]


def test_an_evaluation_has_microbatches_of_its_own_and_leaves_nothing_out() -> None:
    flags = "--eval-micro-batch-size 3 --eval-global-batch-size 6 --skip-samples 1-2"
    with _loaders(flags) as (loaders, _):
        assert [sample in loaders.skipped for sample in (0, 1, 2, 3)] == [False, True, True, False]
        [batch, _] = loaders.train.global_batch(0, 2)
        assert batch.loss_mask is not None
        assert batch.loss_mask.sum(dim=1).tolist() == [16.0, 0.0]
        assert loaders.valid is not None
        assert loaders.test is None
        [held_out, _] = loaders.valid.loader.global_batch(0, 2, end=6)
        assert held_out.loss_mask is not None
        assert held_out.loss_mask.sum(dim=1).tolist() == [16.0, 16.0, 16.0]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("separates", [False, True])
def test_documents_are_kept_apart_by_their_own_flags(restarts: bool, separates: bool) -> None:
    flags = "--attention-dropout 0 " + "--reset-position-ids " * restarts + "--reset-attention-mask " * separates
    with _loaders(flags) as (loaders, _):
        batch = loaders.train.global_batch(0, 2)[0]
    assert batch.position_ids is not None
    expected = [0, 1, 2, 3, 4] if restarts else [5, 6, 7, 8, 9]
    assert batch.position_ids.expand(2, 16)[1, 5:10].tolist() == expected
    assert (batch.documents is not None) == separates


def test_attention_over_exchanged_heads_sees_whole_documents() -> None:
    """Ranks count documents at the positions that they hold; those that exchange heads have the whole ones as well."""
    documents: dict[str, Any] = {}
    for kind in ("a2a", "all_gather"):
        flags = f"--context-parallel-size 2 --cp-comm-type {kind} --reset-attention-mask --attention-dropout 0"
        with _loaders(flags, 1, 2) as (loaders, _):
            documents[kind] = loaders.train.global_batch(0, 2)[0].documents
    with _loaders("--reset-attention-mask --attention-dropout 0") as (loaders, _):
        alone = str(loaders.train.global_batch(0, 2)[0].documents)
    assert str(documents["a2a"].whole) == alone
    assert documents["all_gather"].whole is None
    assert str(replace(documents["a2a"], whole=None)) == str(documents["all_gather"]) != alone


def test_precision_and_determinism_of_kernels_are_those_of_the_flags() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        asking = "--tf32 --deterministic-mode --disable-bf16-reduced-precision-matmul"
        for flags, asked in (("", False), (asking, True)):
            with built(flags):
                assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction != asked
                kernels = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
                assert kernels == (asked, asked)
                assert torch.are_deterministic_algorithms_enabled() == asked
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
