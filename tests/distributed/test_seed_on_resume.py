"""A run that goes on with another seed than it began with says so."""

import shlex
from pathlib import Path

from megatron_ext.verify.ranks import run_ranks
from tests.support.program import run_program

_FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 61
    --micro-batch-size 1 --lr 1e-3 --eval-interval 0 --lr-decay-style constant --lr-decay-iters 2 --seed 5
""")


def test_another_seed_is_reported(tmp_path: Path) -> None:
    save = str(tmp_path / "save")
    [first] = run_ranks(1, run_program, [*_FLAGS, "--train-iters", "1", "--save", save])
    assert first.code == 0, first.errors
    resumed = [*_FLAGS, "--train-iters", "2", "--load", save]
    [same] = run_ranks(1, run_program, resumed)
    [other] = run_ranks(1, run_program, [*resumed, "--seed", "6"])
    [finetuned] = run_ranks(1, run_program, [*resumed, "--seed", "6", "--finetune"])
    assert [ended.code for ended in (same, other, finetuned)] == [0, 0, 0], other.errors
    said = f"--seed 6, but the checkpoint in --load {save} was saved with 5"
    assert said in other.errors
    assert "use --seed 5 to go on with that one" in other.errors
    assert "--seed" not in same.errors + finetuned.errors
