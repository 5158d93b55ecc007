"""Losses on held-out data: which samples, with which weights, and what is put back afterwards."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.resilience.progress import EVALUATION
from megatron_ext.train import evaluate as module
from megatron_ext.train.evaluate import HeldOutLoss, evaluate, evaluate_sources
from megatron_ext.train.run import HeldOut, HeldOutPart
from tests.support.small_models import small_config


class _Chunk:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def eval(self) -> None:
        self.calls.append("eval")

    def train(self) -> None:
        self.calls.append("train")


class _Loader:
    """Gives the samples' numbers; past the end there are none."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def global_batch(self, start: int, count: int, end: int) -> list[int]:
        self.asked.append((start, count, end))
        return list(range(start, min(start + 3 * count, end)))


def _evaluated(monkeypatch: pytest.MonkeyPatch, *parts: range) -> tuple[HeldOutLoss, Any, HeldOut]:
    """Batches of 6 samples in microbatches of 3. Sample i has i tokens, each with a loss of i nats."""
    inside: list[str] = []

    @contextmanager
    def gathered() -> Iterator[None]:
        inside.append("gathered")
        yield
        inside.clear()

    def loss(run: Any, samples: list[int]) -> tuple[float, int]:
        assert inside == ["gathered"]
        assert not torch.is_grad_enabled()
        assert [chunk.calls for chunk in run.chunks] == [["eval"], ["eval"]]
        tokens = sum(samples)
        return (sum(n * n for n in samples) / tokens if tokens else math.nan), tokens

    monkeypatch.setattr(module, "held_out_loss", loss)
    begun: list[str] = []
    run: Any = SimpleNamespace(
        config=small_config(
            training={"micro_batch_size": 2, "eval_micro_batch_size": 3, "eval_global_batch_size": 6},
        ),
        chunks=[_Chunk(), _Chunk()],
        gathered_parameters=gathered,
        progress=SimpleNamespace(loading=_nothing, begin_batch=begun.append),
    )
    loader: Any = _Loader()
    data = HeldOut(loader, tuple(HeldOutPart(str(number), str(number), part) for number, part in enumerate(parts)))
    found = evaluate_sources(run, data)
    assert [chunk.calls for chunk in run.chunks] == [["eval", "train"], ["eval", "train"]], "dropout is on again"
    assert begun == [EVALUATION] * len(loader.asked)
    return found, run, data


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_every_token_counts_once_in_its_source_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of a source is a remainder, and ends with the source."""
    found, run, data = _evaluated(monkeypatch, range(8), range(8, 11))
    loader: Any = data.loader
    assert loader.asked == [(0, 2, 8), (6, 2, 8), (8, 2, 11)]
    first, second = (sum(n * n for n in part) for part in (range(8), range(8, 11)))
    assert found.parts == pytest.approx((first / 28, second / 27), rel=1e-15)
    assert found.all == pytest.approx((first + second) / 55, rel=1e-15)
    run.chunks = [_Chunk(), _Chunk()]
    assert evaluate(run, data) == found.all


def test_a_source_in_which_no_token_counts_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, _ = _evaluated(monkeypatch, range(1), range(3, 4))
    assert math.isnan(found.parts[0])
    assert (found.parts[1], found.all) == (3.0, 3.0)
    assert math.isnan(_evaluated(monkeypatch, range(1))[0].all)
