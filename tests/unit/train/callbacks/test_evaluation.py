"""When a real small run evaluates, on which data, and what it tells."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.telemetry.metrics import TestMetrics as LossOfTest
from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from tests.support.small_runs import MODEL


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
