"""The helpers of the benchmarks that compare how well small models learn."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.learning_runs import Compared, Learned, Runs, best_rate, compare, table

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 1 --eval-interval 10 --eval-iters 1 --device cpu"
)


def test_a_run_of_the_file_is_not_trained_again(tmp_path: Path) -> None:
    first = Runs(tmp_path / "runs.jsonl").run([*MODEL.split(), "--lr", "0.001"], 20, 1)
    assert len(first.losses) == 2
    assert sorted(first.validation) == [10, 20]
    assert first.final == first.validation[20]
    assert first.step_seconds > 0
    assert Runs(tmp_path / "runs.jsonl").run([*MODEL.split(), "--lr", "0.001"], 20, 1) == first
    other = Runs(tmp_path / "runs.jsonl").run([*MODEL.split(), "--lr", "0.001"], 20, 2)
    assert other.losses != first.losses
    assert [json.loads(line)["losses"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()] == [
        first.losses,
        other.losses,
    ]


@pytest.mark.parametrize("best", [0.001, 0.004, 0.032])
def test_the_best_rate_lies_between_two_that_were_tried(best: float) -> None:
    found = best_rate(lambda rate: abs(math.log2(rate / best)), 0.004)
    assert min(found, key=found.__getitem__) == pytest.approx(best)
    assert {best / 2, best, best * 2} <= set(found)


def test_a_rate_whose_run_breaks_off_is_not_the_best() -> None:
    found = best_rate(lambda rate: math.inf if rate > 0.005 else 1 / rate, 0.004)
    assert min(found, key=found.__getitem__) == 0.004


def test_cost_until_the_first_rows_loss_lies_between_evaluations() -> None:
    slow = Learned([3.0], {100: 4.0, 200: 3.0}, 0.5)
    fast = Learned([2.0], {100: 3.5, 200: 2.5}, 1.0)
    rows = [Compared("slow", 10, 0.1, [slow]), Compared("fast", 10, 0.1, [fast])]
    text = table(rows, 200)
    assert text[2].endswith("| 100 | 100 |")
    assert text[3].endswith("| 200 | 150 |")


def test_a_size_without_seeds_is_not_compared(tmp_path: Path) -> None:
    flags = {"small": lambda size, rate: [*MODEL.split(), "--lr", str(rate)]}
    sizes = compare(Namespace(data=tmp_path, steps=20, seeds=[1, 0]), flags, {"small": 0.001})
    assert list(sizes) == ["1M"]
    assert len(table(sizes["1M"], 20)) == 3
