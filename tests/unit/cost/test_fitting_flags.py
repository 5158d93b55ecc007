"""The flags that `--dry-run` names where a layout does not fit in a device's memory."""

import shlex

import pytest

from megatron_ext.config.schema import Config
from megatron_ext.cost.dry_run import verdict
from megatron_ext.train.configure import configure

MODEL = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50000 --train-iters 10 --lr 1e-4 --bf16 --dry-run "
)
LAYOUTS = {
    "one GPU": "--device cuda --micro-batch-size 8 --global-batch-size 64",
    "DP8": "--device cuda --world-size 8 --micro-batch-size 4 --global-batch-size 64",
    "TP2": "--device cuda --world-size 2 --tensor-model-parallel-size 2 --micro-batch-size 8 --global-batch-size 64",
    "PP2, experts": "--device cuda --world-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 8 "
    "--global-batch-size 64 --num-experts 8 --disable-bias-linear",
}


def _config(words: list[str]) -> Config:
    return configure(words, believing=True).config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_named_fits_once_it_is_typed(layout: str) -> None:
    words = shlex.split(MODEL + LAYOUTS[layout])
    named = 0
    for memory in (10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 200.0):
        lines, fits = verdict(_config(words), device_memory_gb=memory)
        if fits or "add " not in lines[-1]:
            continue
        named += 1
        flags = lines[-1].partition("add ")[2].partition(", and it fits")[0]
        assert verdict(_config([*words, *shlex.split(flags)]), device_memory_gb=memory)[1], (memory, flags)
    assert named > 0


def test_where_no_flag_is_enough_the_planner_is_named() -> None:
    lines, fits = verdict(_config(shlex.split(MODEL + LAYOUTS["one GPU"])), device_memory_gb=1.0)
    assert not fits
    assert "megatron-ext plan searches for another layout" in lines[-1]
