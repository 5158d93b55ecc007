"""The loss of a real small run's model on held-out data: which samples, with which weights, and what is put back."""

import math
from typing import Any

import pytest
import torch

from megatron_ext.data.corpus import Splits
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.train.callbacks.evaluation import HeldOutLoss, evaluate, evaluate_sources
from megatron_ext.train.run import HeldOut, HeldOutPart, Run
from megatron_ext.train.step import held_out_loss
from tests.support.small_runs import built

FLAGS = "--eval-global-batch-size 6 --eval-micro-batch-size 3 --eval-iters 4"
"""Batches of 6 samples in microbatches of 3."""


class Valid:
    """Synthetic samples, of which sample i has i tokens that count."""

    samples = MockDataset(vocab_size=64, seq_length=16, num_samples=24, seed=1, split=1)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {**self.samples[index], "loss_mask": torch.arange(16) < index}


def _datasets(*_: Any) -> Splits[Any]:
    return Splits(MockDataset(vocab_size=64, seq_length=16, num_samples=99, seed=1, split=0), Valid(), None)


def _evaluated(run: Run, *parts: range) -> HeldOutLoss:
    assert run.loaders.valid is not None
    named = tuple(HeldOutPart(str(number), str(number), part) for number, part in enumerate(parts))
    return evaluate_sources(run, HeldOut(run.loaders.valid.loader, named))


def test_every_token_counts_once_in_its_source_and_in_all() -> None:
    """The last batch of a source is a remainder, and ends with the source. Dropout is off, and on again afterwards."""
    grads: list[bool] = []

    def loss(token: Any) -> torch.Tensor:
        grads.append(torch.is_grad_enabled())
        return token.cross_entropy()

    with built(FLAGS, datasets=_datasets, loss=loss) as run:
        found = _evaluated(run, range(8), range(8, 11))
        assert grads
        assert not any(grads)
        assert all(chunk.training for chunk in run.chunks)
        assert _evaluated(run, range(8), range(8, 11)) == found
        assert run.loaders.valid is not None
        assert evaluate(run, run.loaders.valid) == evaluate_sources(run, run.loaders.valid).all
        for chunk in run.chunks:
            chunk.eval()
        alone = {}
        for sample in range(1, 11):
            with torch.no_grad():
                batch = run.loaders.valid.loader.global_batch(sample, 1, end=sample + 1)
                alone[sample], tokens = held_out_loss(run, batch)
            assert tokens == sample
    first, second = (sum(sample * alone.get(sample, 0.0) for sample in part) for part in (range(8), range(8, 11)))
    assert found.parts == pytest.approx((first / 28, second / 27), rel=1e-6)
    assert found.all == pytest.approx((first + second) / 55, rel=1e-6)


def test_a_source_in_which_no_token_counts_has_no_loss() -> None:
    with built(FLAGS, datasets=_datasets) as run:
        found = _evaluated(run, range(1), range(3, 4))
        assert math.isnan(found.parts[0])
        assert found.parts[1] == found.all
        assert math.isnan(_evaluated(run, range(1)).all)
