"""--pipeline-schedule on real ranks: what is recorded is the table, and it trains what the engine's order trains."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_ext.plan.schedule import named
from megatron_ext.telemetry import schedule_record
from megatron_ext.verify.ranks import run_ranks
from tests.support.program import run_program

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61
    --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --eval-interval 3 --eval-iters 1
    --lr-decay-iters 10 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --pipeline-model-parallel-size 2
""")
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
RECORD = "--record-schedule --profile-step-start 2 --profile-step-end 3"


def train(folder: Path, flags: str, ranks: int = 2) -> tuple[list[dict], str]:
    """The rows of metrics, and what the ranks have printed."""
    ends = run_ranks(ranks, run_program, [*FLAGS, *shlex.split(flags), "--save", str(folder), "--save-interval", "100"])
    assert [end.code for end in ends] == [0] * ranks, ends
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, "".join(end.output for end in ends)


@pytest.mark.parametrize("name", ["looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipe-v"])
def test_what_is_recorded_is_the_table(name: str, tmp_path: Path) -> None:
    train(tmp_path, f"{TWO_CHUNKS} --pipeline-schedule {name} {RECORD}")
    table = named(name, 2, 2, 4)
    for rank, record in enumerate(schedule_record.read(tmp_path)):
        [step] = record.steps
        found = [(each.forward, each.chunk, each.microbatch, each.half) for each in step.passes]
        assert found == [tuple(work) for work in table.order(rank)]
        assert all(one.end <= other.begin for one, other in zip(step.passes, step.passes[1:], strict=False))


@pytest.mark.parametrize(
    ("ranks", "sharding"), [(2, ""), (4, "--use-torch-fsdp2 --global-batch-size 8")], ids=["", "FSDP2"]
)
def test_a_table_of_a_file_trains_what_the_engine_trains(ranks: int, sharding: str, tmp_path: Path) -> None:
    """With one split pass, and validation, and a checkpoint that the other layout reads."""
    file = tmp_path / "table.csv"
    file.write_text("0F0,0F1,0F2,0B0,0F3,0I1,0B2,0W1,0B3\n1F0,1B0,1F1,1F2,1I1,1B2,1W1,1F3,1B3\n")
    ours, _ = train(tmp_path / "ours", f"--pipeline-schedule {file} {sharding}", ranks)
    engines, _ = train(tmp_path / "engines", sharding, ranks)
    for one, other in zip(ours, engines, strict=True):
        for key in {"lm_loss", "grad_norm", "validation_loss"} & other.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-5)
    resumed, _ = train(tmp_path / "resumed", f"--load {tmp_path / 'ours'} --train-iters 4 {sharding}", ranks)
    assert [row["iteration"] for row in resumed if "lm_loss" in row] == [4]


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
