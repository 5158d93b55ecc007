"""tools/prepare_cache.py builds what a run with the same flags then reads, without a process group."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prepare.commands.prepare_cache import main
from megatron_ext.train.configure import configure
from megatron_ext.train.datasets import datasets_of_run, tokenizer_of_run

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --lr 1e-3 --micro-batch-size 1
    --train-iters 10 --eval-iters 1 --tokenizer-type NullTokenizer --vocab-size 61 --split 90,10,0
    --tensor-model-parallel-size 2 --world-size 8
"""


def test_a_run_finds_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a", "b"):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add_tokens((np.arange(1000) % 61).astype(np.uint16).tobytes(), [10] * 100)
    blend = f"--data-path 0.5 {tmp_path}/a 0.5 {tmp_path}/b --data-cache-path {tmp_path}/cache"
    flags = shlex.split(f"{FLAGS} {blend}")

    def written() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}

    assert main(flags) == 0
    assert not torch.distributed.is_initialized()
    assert capsys.readouterr().out == (
        f"train: 40 samples of {tmp_path}/a, {tmp_path}/b\nvalid: 24 samples of {tmp_path}/a, {tmp_path}/b\n"
    )
    prepared = written()
    config = configure([*flags, "--dry-run"]).config
    datasets = datasets_of_run(config, tokenizer_of_run(config))
    assert datasets.train is not None
    assert len(datasets.train) == 40
    assert written() == prepared, "nothing is built again"
    main([*flags, "--seed", "5"])
    assert len(written()) == 2 * len(prepared)


def test_an_order_without_an_index_has_nothing_to_prepare(capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(f"{FLAGS} --mock-data")) == 0
    assert capsys.readouterr().out == "nothing to prepare: this order of the samples has no index\n"
    with pytest.raises(ConfigurationError):
        main(["--mock-data"])
