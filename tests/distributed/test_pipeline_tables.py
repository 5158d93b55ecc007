"""--pipeline-schedule on real ranks: passes run in the order of the table, and train what the engine's order trains."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import device
from megatron_ext.cost.schedule import named
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.train.build import build_run
from megatron_ext.train.configure import configure
from megatron_ext.train.trainer import Trainer
from tests.support.program import run_program

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61
    --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --eval-interval 3 --eval-iters 1
    --lr-decay-iters 10 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --pipeline-model-parallel-size 2
""")
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"


def train(folder: Path, flags: str, ranks: int = 2) -> tuple[list[dict], str]:
    """The rows of metrics, and what the ranks have printed."""
    ends = run_ranks(ranks, run_program, [*FLAGS, *shlex.split(flags), "--save", str(folder), "--save-interval", "100"])
    assert [end.code for end in ends] == [0] * ranks, ends
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, "".join(end.output for end in ends)


def passes(name: str) -> list[tuple[bool, int, int]]:
    """The passes of this rank in one step: forward or not, chunk, microbatch, in the order in which they began."""
    flags = [*FLAGS, *shlex.split(f"{TWO_CHUNKS} --pipeline-schedule {name} --device cpu")]
    run = build_run(configure(flags).config, device.install("cpu"))
    found: list[tuple[bool, int, int]] = []
    for number, chunk in enumerate(run.chunks):
        count = itertools.count()

        def noted(_module: Any, _inputs: Any, output: torch.Tensor, number: int = number, count: Any = count) -> None:
            microbatch = next(count)
            found.append((True, number, microbatch))
            output.register_hook(lambda _: found.append((False, number, microbatch)))

        chunk.register_forward_hook(noted)
    Trainer(run, []).step()
    return found


@pytest.mark.parametrize("name", ["looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipe-v"])
def test_the_passes_of_a_step_are_those_of_the_table(name: str) -> None:
    table = named(name, 2, 2, 4)
    for rank, found in enumerate(run_ranks(2, passes, name)):
        assert found == [tuple(work)[:3] for work in table.order(rank) if work.half != "weights"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "sharding"), [(2, ""), (4, "--use-torch-fsdp2 --global-batch-size 8")], ids=["", "FSDP2"]
)
def test_a_table_trains_what_the_engine_trains(ranks: int, sharding: str, tmp_path: Path) -> None:
    """With split passes, and validation, and a checkpoint that the other layout reads."""
    ours, _ = train(tmp_path / "ours", f"--pipeline-schedule interleaved-zero-bubble {sharding}", ranks)
    engines, _ = train(tmp_path / "engines", sharding, ranks)
    for one, other in zip(ours, engines, strict=True):
        for key in {"lm_loss", "grad_norm", "validation_loss"} & other.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-5)
    resumed, _ = train(tmp_path / "resumed", f"--load {tmp_path / 'ours'} --train-iters 4 {sharding}", ranks)
    assert [row["iteration"] for row in resumed if "lm_loss" in row] == [4]


@pytest.mark.full
def test_a_checkpoint_of_a_v_is_read_by_any_layout(tmp_path: Path) -> None:
    train(tmp_path / "v", f"{TWO_CHUNKS} --pipeline-schedule zbv")
    plain, _ = train(tmp_path / "plain", f"--load {tmp_path / 'v'} --train-iters 5")
    again, _ = train(
        tmp_path / "again", f"{TWO_CHUNKS} --pipeline-schedule zbv --load {tmp_path / 'v'} --train-iters 5"
    )
    for one, other in zip(plain, again, strict=True):
        for key in {"lm_loss", "grad_norm", "validation_loss"} & other.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-5)


def test_what_is_not_split_is_said(tmp_path: Path) -> None:
    _, said = train(tmp_path, f"{TWO_CHUNKS} --pipeline-schedule zbv")
    [line] = [line for line in said.splitlines() if line.startswith("pipeline: backward passes are split")]
    assert line.endswith(": embedding.position_embeddings.weight, embedding.word_embeddings.weight")


def test_an_evaluation_has_fewer_microbatches_than_a_table_takes(tmp_path: Path) -> None:
    """dualpipe-v trains with four or more here."""
    small = "--eval-global-batch-size 2 --train-iters 1 --eval-interval 1"
    found = [
        train(tmp_path / str(number), f"{small} {flags}")[0]
        for number, flags in enumerate((f"{TWO_CHUNKS} --pipeline-schedule dualpipe-v", ""))
    ]
    losses = [[row["validation_loss"] for row in rows if "validation_loss" in row] for rows in found]
    assert len(losses[0]) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
