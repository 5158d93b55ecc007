"""When a real small run evaluates, on which data, with which weights, and what it tells and puts back."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.data.corpus import Splits
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.telemetry.metrics import TestMetrics as LossOfTest
from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.train.callbacks.evaluation import HeldOutLoss, evaluate, evaluate_sources
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.run import HeldOut, HeldOutPart, Run
from megatron_ext.train.step import held_out_loss
from megatron_ext.train.trainer import Callback
from tests.support.small_runs import MODEL, built


def _evaluated(flags: str) -> list[tuple[str, int]]:
    """Run; return which data was evaluated at which iteration."""
    heard: list[tuple[str, int]] = []

    class Hears(Callback):
        def on_evaluation(self, trainer: Any, metrics: Any) -> None:
            assert metrics.consumed_samples == 4 * metrics.iteration
            kind = {ValidationMetrics: "valid", LossOfTest: "test"}[type(metrics)]
            heard.append((kind, metrics.iteration))

    pretrain([*MODEL, "--eval-interval", "3", *flags.split()], callbacks=[Hears()])
    return heard


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        ("--train-iters 7", [("valid", 3), ("valid", 6), ("valid", 7), ("test", 7)]),
        ("--train-iters 6", [("valid", 3), ("valid", 6), ("test", 6)]),
        ("--train-iters 7 --exit-interval 4", [("valid", 3)]),
        ("--train-iters 7 --exit-interval 4 --eval-at-start", [("valid", 0), ("valid", 3)]),
        ("--train-iters 8 --exit-interval 7 --start-eval-at-iter 6", [("valid", 6)]),
        ("--train-iters 8 --exit-interval 7 --start-eval-at-iter 7", []),
    ],
)
def test_when_it_evaluates(flags: str, seen: list[tuple[str, int]]) -> None:
    """At the end once, and only if it is the planned one; before the first step only where that is asked for."""
    assert _evaluated(flags) == seen


def test_a_run_that_goes_on_evaluates_what_its_file_lacks(tmp_path: Path) -> None:
    """Before its first step only where there was none. With --skip-train, which asks for nothing but an evaluation,
    everything."""
    flags = f"--save {tmp_path} --load {tmp_path} --train-iters 6 --eval-at-start"
    assert _evaluated(f"{flags} --exit-interval 4") == [("valid", 0), ("valid", 3)]
    assert _evaluated(flags) == [("valid", 6), ("test", 6)]
    assert _evaluated(flags) == [], "all is in the file"
    assert _evaluated(f"{flags} --skip-train") == [("valid", 6), ("test", 6)]
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(row for row in rows if "test_loss" not in row))
    assert _evaluated(flags) == [("test", 6)]


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


def _losses_of(run: Run, *parts: range) -> HeldOutLoss:
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
        found = _losses_of(run, range(8), range(8, 11))
        assert grads
        assert not any(grads)
        assert all(chunk.training for chunk in run.chunks)
        assert _losses_of(run, range(8), range(8, 11)) == found
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
        found = _losses_of(run, range(1), range(3, 4))
        assert math.isnan(found.parts[0])
        assert found.parts[1] == found.all
        assert math.isnan(_losses_of(run, range(1)).all)
