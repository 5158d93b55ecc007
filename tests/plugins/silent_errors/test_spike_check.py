"""--spike-threshold in a real small run whose losses are scripted: which are spikes, and what is written of them."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.data.corpus import Splits
from megatron_ext.errors import NumericError, StorageError
from megatron_ext.train.pretrain import pretrain
from tests.support.small_runs import MODEL


class Numbered:
    """Samples whose labels are their own number."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        labels = torch.full((16,), index)
        return {"tokens": labels, "labels": labels, "loss_mask": torch.ones(16), "position_ids": torch.arange(16)}


def _run(loss_of: Callable[[int], float], steps: int, *flags: str, threshold: float = 2.0) -> None:
    """Train on numbered samples, each with a loss of its own and no gradient, in steps of two microbatches of two."""

    def loss(token: Any) -> torch.Tensor:
        values = torch.tensor([loss_of(int(number)) for number in token.labels_BS[:, 0]])
        return token.cross_entropy() * 0.0 + values[:, None]

    given = ["--train-iters", str(steps), "--spike-threshold", str(threshold)]
    given += ["--num-layers", "1", "--vocab-size", "512", "--eval-iters", "0"]
    own: dict[str, Any] = {"loss": loss, "datasets": lambda *_: Splits(Numbered(), None, None)}
    pretrain([*MODEL, *given, "--no-check-for-nan-in-loss-and-grad", *flags], **own)


SAID = re.compile(r"loss of iteration (\d+) is ([^,;]+)(?:, (\S+) times the median of the last (\d+) steps)?; the same")
Judged = list[tuple[int, str, str, str]]


def _judged(capsys: pytest.CaptureFixture[str], losses: list[float], **given: Any) -> Judged:
    """Return the steps whose loss is judged, and what is said of it."""
    capsys.readouterr()
    _run(lambda sample: losses[sample // 4], len(losses), **given)
    return [(int(step), *rest) for step, *rest in SAID.findall(capsys.readouterr().err)]


USUAL = [3.0] * 10


def test_which_losses_are_spikes(capsys: pytest.CaptureFixture[str]) -> None:
    """More than twice the median of at most 100 steps, of which there must be ten."""
    assert _judged(capsys, [*USUAL[:9], 100.0]) == [], "ten are needed"
    assert _judged(capsys, [*USUAL, 6.0]) == [], "twice is not more than twice"
    assert _judged(capsys, [*USUAL, 6.5]) == [(11, "6.5", "2.17", "11")]
    assert _judged(capsys, [*USUAL, 4.625], threshold=1.5) == [(11, "4.625", "1.54", "11")]


def test_what_is_no_number_is_a_spike_and_not_in_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    assert _judged(capsys, [3.0, math.nan, 3.0]) == [(2, "nan", "", "")]
    *_, last = _judged(capsys, [*USUAL, math.nan, math.inf, -math.inf, math.nan, 6.5])
    assert last == (15, "6.5", "2.17", "11")


def test_losses_of_more_than_a_hundred_steps_ago_are_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    assert [step for step, *_ in _judged(capsys, [100.0] * 51 + [1.0] * 51 + [2.5])] == [103]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_of_a_spike_are_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the microbatches above the limit, the worst first, without what is left out."""

    def loss_of(sample: int) -> float:
        return {40: 2.0, 41: 2.0, 42: 9.0, 43: 13.0, 44: 7.0, 45: 7.0}.get(sample, 3.0)

    flags = ["--global-batch-size", "8", "--skip-samples", "43-43", "--save", str(tmp_path)]
    _run(lambda sample: loss_of(sample - 40), 11, *flags)
    assert not (tmp_path / "spike-11").exists(), "the mean of these was no spike"
    flags = ["--skip-samples", "43-43", "--save", str(tmp_path / "b")]
    _run(lambda sample: loss_of(sample) * (1 if sample < 40 else 2), 11, *flags)
    folder = tmp_path / "b" / "spike-11"
    batch = _rows(folder / "batch.jsonl")
    assert [(row["microbatch"], row["samples"], row["losses"]) for row in batch] == [
        (0, [40, 41], [4.0, 4.0]),
        (1, [42, 43], [18.0, 18.0]),
    ]
    assert {(row["iteration"], *row["data_parallel_ranks"]) for row in batch} == {(11, 0, 0)}
    [sample] = _rows(folder / "samples.jsonl")
    assert (sample["sample"], sample["loss_of_microbatch"]) == (42, 18.0)
    assert sample["from"].startswith("sample 42 of")
    assert "42" in sample["text"]
    said = capsys.readouterr().err
    assert "on the same ranks, which says nothing of a fault that repeats itself, have the same loss" in said
    assert f"--skip-samples {folder / 'samples.jsonl'}" in said
    _run(lambda sample: math.nan if sample == 41 else 3.0, 11)
    assert "Samples 40-43; with --save they are written down" in capsys.readouterr().err


@pytest.mark.parametrize(("bad", "guilty"), [({2}, [2, 3]), ({0, 4}, [0, 1]), ({3, 4}, [2, 3]), ({5}, [4])])
def test_without_a_usual_loss_the_worst_microbatch_is_guilty(bad: set[int], guilty: list[int], tmp_path: Path) -> None:
    """NaN is worse than any loss, wherever it stands; of several the first. What is left out is not guilty."""
    skipped = ["--skip-samples", "5-5"] if 5 in bad else []
    bad = {4} if 5 in bad else bad
    flags = ["--global-batch-size", "6", "--save", str(tmp_path), *skipped]
    _run(lambda sample: math.nan if sample in bad else 2.0 + sample, 1, *flags)
    assert [row["sample"] for row in _rows(tmp_path / "spike-1" / "samples.jsonl")] == guilty


def test_the_first_64_samples_of_a_spike_have_their_text(tmp_path: Path) -> None:
    flags = ["--global-batch-size", "70", "--micro-batch-size", "70", "--save", str(tmp_path)]
    _run(lambda sample: math.inf, 1, *flags)
    rows = _rows(tmp_path / "spike-1" / "samples.jsonl")
    assert ["text" in row for row in rows] == [True] * 64 + [False] * 6


def test_another_loss_of_the_same_samples_ends_the_run() -> None:
    """With one rank it is the suspect."""
    computed: Counter[int] = Counter()

    def loss_of(sample: int) -> float:
        computed[sample] += 1
        return 3.0 if sample < 40 else 9.0 if computed[sample] == 1 else 4.0

    said = (
        r"^the loss of iteration 11 is 9, 3 times the median of the last 11 steps, and the same samples and weights "
        r"give another loss when they are computed again: microbatch 0 of data-parallel rank 0 has 9 on rank 0 "
        r"\(machine .*\), 4 on rank 0 .*\. Suspect: rank 0 \(machine .*\)\. This iteration changed no weight\. Next: "
        r"take that machine out"
    )
    with pytest.raises(NumericError, match=said):
        _run(loss_of, 11)


def test_a_folder_of_a_spike_that_cannot_be_written_is_a_matter_of_storage(tmp_path: Path) -> None:
    (tmp_path / "spike-1").touch()
    with pytest.raises(StorageError, match=r"^cannot write .*/spike-1: File exists\. Free space there$"):
        _run(lambda sample: math.nan, 1, "--save", str(tmp_path))
