"""What one layout saves, another loads: saved again there, every tensor of the checkpoint is bitwise the same."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_ext.verify.ranks import run_ranks

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --seq-length 16 --max-position-embeddings 16 --mock-data --vocab-size 61
    --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-2
    --eval-interval 0 --bf16 --device cpu
""")
TP2_PP2_VPP2_DP2 = shlex.split("""
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer
""")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "DP2, distributed optimizer": (2, ["--use-distributed-optimizer", "--ddp-bucket-size", "3000"]),
    "TP2": (2, ["--tensor-model-parallel-size", "2"]),
    "PP4": (4, ["--pipeline-model-parallel-size", "4"]),
    "PP2 VPP2, Et|tt|t|L": (
        2,
        [
            *["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et|t*2|t|L"],
            *["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        ],
    ),
}


def _resave(flags: list[str], load: str | None, save: str) -> None:
    from megatron_ext import device
    from megatron_ext.checkpoint.load import load_checkpoint
    from megatron_ext.checkpoint.save import save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags).config, device.install("cpu"))
    if load is None:
        trainer = Trainer(run, [])
        for _ in range(2):
            trainer.step()
    else:
        assert load_checkpoint(run, load) == 2
    save_checkpoint(run, save)


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, whole, as torch itself reads it."""
    reader = FileSystemReader(f"{folder}/iter_0000002")
    tensors: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    folder = str(tmp_path_factory.mktemp("saved"))
    run_ranks(8, _resave, [*FLAGS, *TP2_PP2_VPP2_DP2], None, folder)
    return folder, _tensors(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_share_checkpoints(layout: str, saved: tuple[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, expected = saved
    world_size, flags = LAYOUTS[layout]
    run_ranks(world_size, _resave, [*FLAGS, *flags], folder, str(tmp_path))
    found = _tensors(str(tmp_path))
    assert found.keys() == expected.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in found)
    assert any(key.startswith("optimizer.state.param.") for key in found)
    for key, tensor in found.items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor.view(torch.uint8), expected[key].view(torch.uint8)), key
