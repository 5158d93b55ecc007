"""Checkpoints that DeepSpeed 0.19.8 itself wrote (tests/data/README.md) go on here, with Adam's state."""

import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.checkpoint.deepspeed.importer import import_deepspeed
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.data.corpus import Splits
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import build, train

DATA = Path(__file__).parents[1] / "data"
MODELS = {
    "deepspeed_0.19.8": "--hidden-size 16 --vocab-size 64",
    "deepspeed_0.19.8_bloom": "--hidden-size 8 --vocab-size 32 --position-embedding-type alibi --embed-layernorm",
}
FLAGS = shlex.split(
    "--num-layers 2 --num-attention-heads 4 --seq-length 12 --openai-gelu "
    "--make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2 "
    "--lr-decay-style constant --weight-decay 0.1 --attention-dropout 0 --hidden-dropout 0 --eval-interval 0 "
    "--num-workers 0 --mock-data --device cpu --bf16"
)


class _Samples:
    def __init__(self, rows: list[list[int]]):
        self.rows = np.array(rows)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[(index - 12) % len(self.rows)]
        places = {"position_ids": np.arange(12), "loss_mask": np.ones(12, np.float32)}
        return {"tokens": row[:-1], "labels": row[1:], **places}


def _go_on(flags: list[str], rows: list[list[int]]) -> list[float]:
    run = build(flags, datasets=lambda *_: Splits(_Samples(rows), None, None))
    assert load_checkpoint(run, run.config.checkpoint.load) == 3
    return train(run, 2)


_TP, _PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("deepspeed_0.19.8", layout) for layout in ("", _TP, "--use-distributed-optimizer")),
        *(("deepspeed_0.19.8_bloom", layout) for layout in ("", _TP, _PP, "--use-torch-fsdp2")),
    ],
)
def test_training_goes_on_as_deepspeed_went_on(name: str, layout: str, tmp_path: Path) -> None:
    """From a universal checkpoint, and from ZeRO's shards of a BLOOM's TP2 x PP2 next to its layer files."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path / "written", filter="data")
    import_deepspeed(tmp_path / "written", tmp_path / "ours")
    expected = json.loads((tmp_path / "written/expected.json").read_text())
    flags = [*FLAGS, *MODELS[name].split(), *layout.split(), "--load", str(tmp_path / "ours")]
    losses = run_ranks(2 if layout else 1, _go_on, flags, expected["samples"])
    assert losses[0] == pytest.approx(expected["losses"], rel=1e-3)
