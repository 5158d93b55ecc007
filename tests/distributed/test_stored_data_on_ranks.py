"""A run whose data lies behind a URL has the losses of one from the disk, bit for bit."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_ext.verify.parity import write_corpus
from megatron_ext.verify.ranks import run_ranks
from tests.support.program import run_program

FLAGS = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --lr 1e-3 --eval-interval 4 --log-interval 1 --tensor-model-parallel-size 1"
)


@pytest.mark.parametrize("order", ["shuffled", "formula"])
def test_the_losses_are_those_of_the_disk(order: str, tmp_path: Path) -> None:
    data = [*write_corpus(tmp_path), "--data-order", order]
    cache = data.index("--data-cache-path")
    del data[cache : cache + 2]
    far = [f"file://{word}" if word.startswith("/") else word for word in data]
    rows = []
    for name, flags in (("near", data), ("far", far)):
        metrics = tmp_path / f"{name}.jsonl"
        environment = {"XDG_CACHE_HOME": str(tmp_path / "home")}
        ends = run_ranks(2, run_program, [*FLAGS, *flags, "--metrics-file", str(metrics)], environment=environment)
        assert [end.code for end in ends] == [0, 0], ends[0].errors
        found = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows.append([{key: row.get(key) for key in ("lm_loss", "grad_norm", "validation_loss")} for row in found])
    assert rows[0] == rows[1]
    assert len(rows[0]) >= 4
    copies = sorted(path.name for path in (tmp_path / "home" / "megatron_ext").rglob("*.idx"))
    assert copies == ["train.idx", "valid.idx"], "one copy for the ranks of a machine"
