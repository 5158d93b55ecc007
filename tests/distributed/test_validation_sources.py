"""Several validation sources: the loss of each and of all. A finished run that starts again adds nothing."""

import math
import shlex
from pathlib import Path

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.corpora import write_windows
from tests.support.program import run_program

SEQ = 8
FLAGS = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {SEQ} --lr 1e-3 --micro-batch-size 2
    --global-batch-size 4 --train-iters 2 --eval-interval 2 --log-interval 1 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 16
"""
SAMPLES = {"train": 20, "one": 5, "two": 11}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, samples) in enumerate(SAMPLES.items()):
        write_windows(folder / name, samples, seed)
    return folder


def run(data: Path, save: Path, sets: str, flags: str, ranks: int = 2) -> tuple[list[dict], str]:
    """The evaluations in the metrics file, and what the last rank printed."""
    paths = [f"{data}/{word}" if word in SAMPLES else word for word in sets.split()]
    order = f"--train-data-path {data}/train --valid-data-path {' '.join(paths)} --data-order formula --save {save}"
    ended = run_ranks(ranks, run_program, shlex.split(f"{FLAGS} {order} --load {save} {flags}"))
    assert ended[-1].code == 0, ended[-1].errors
    return [row for row in read_rows(save / "metrics.jsonl") if "validation_loss" in row], ended[-1].output


def test_each_source_and_all(data: Path, tmp_path: Path):
    ([both], output) = run(data, tmp_path / "both", "0.9 one 0.1 two", "--full-validation")
    losses = both["validation_loss_by_source"]
    assert list(losses) == [f"{data}/one", f"{data}/two"]
    mean = sum(losses[f"{data}/{name}"] * SAMPLES[name] for name in ("one", "two")) / 16
    assert math.isclose(both["validation_loss"], mean, rel_tol=1e-12)
    assert f" validation-0 loss at iteration 2 | lm loss value: {losses[f'{data}/one']:.6E} |" in output
    assert f" validation loss at iteration 2 | lm loss value: {both['validation_loss']:.6E} |" in output
    for name in ("one", "two"):
        ([alone], _) = run(data, tmp_path / name, name, "--full-validation", ranks=1)
        assert "validation_loss_by_source" not in alone
        assert alone["validation_loss"] == pytest.approx(losses[f"{data}/{name}"], rel=1e-6)
    # Started again, the finished run adds nothing to its file, and does not evaluate.
    before = (tmp_path / "both" / "metrics.jsonl").read_bytes()
    assert run(data, tmp_path / "both", "0.9 one 0.1 two", "--full-validation")[1].count("validation") == 0
    assert (tmp_path / "both" / "metrics.jsonl").read_bytes() == before
    # Killed between its last save and its last evaluation, it evaluates.
    lines = before.splitlines(keepends=True)
    (tmp_path / "both" / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    assert run(data, tmp_path / "both", "0.9 one 0.1 two", "--full-validation")[0] == [both]


def test_batches_of_each_set_and_their_names(data: Path, tmp_path: Path):
    # One batch of 4 samples of both together, or of each.
    ([together], _) = run(data, tmp_path / "together", "one two", "--eval-iters 1", ranks=1)
    flags = "--eval-iters 1 --multiple-validation-sets --validation-set-names wiki code"
    ([each], output) = run(data, tmp_path / "each", "one two", flags, ranks=1)
    assert list(each["validation_loss_by_source"]) == [f"{data}/one", f"{data}/two"]
    assert math.isclose(each["validation_loss"], sum(each["validation_loss_by_source"].values()) / 2)
    assert together["validation_loss"] != each["validation_loss"]
    assert " validation-wiki loss at iteration 2 |" in output
    assert " validation-code loss at iteration 2 |" in output
