"""Row 19 of the faults: what one layout saves, every other loads, to the bit, and the next losses are the same."""

import shlex
from dataclasses import dataclass
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
    --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 12 --lr 1e-3
    --attention-dropout 0 --hidden-dropout 0 --eval-interval 0 --device cpu
""")
TP2_PP2_VPP2_DP2 = (
    8,
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer",
)
BUCKETS = "--use-distributed-optimizer --ddp-bucket-size 3000"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one process": (1, ""),
    "TP4": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2, uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "DP4, distributed optimizer": (4, BUCKETS),
    "DP4, without distributed optimizer": (4, ""),
    "HSDP 2 x 2, FSDP2": (4, "--use-torch-fsdp2 --num-distributed-optimizer-instances 2"),
    "TP2 x DP2 without distributed optimizer": (4, "--tensor-model-parallel-size 2"),
}
STEPS = 10


@dataclass(frozen=True)
class Saved:
    folder: str
    tensors: dict[str, torch.Tensor]
    losses: list[float]
    """Of the steps after the save."""


def _resave(flags: list[str], load: str | None, save: str) -> list[float]:
    """Load, or take two steps; save; and go on for ten steps more, whose losses are returned."""
    from megatron_ext import device
    from megatron_ext.checkpoint.native.load import load_checkpoint
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags).config, device.install("cpu"))
    trainer = Trainer(run, [])
    if load is None:
        for _ in range(2):
            trainer.step()
    else:
        assert load_checkpoint(run, load) == 2
    save_checkpoint(run, save)
    return [trainer.step().loss for _ in range(STEPS)]


def _saved(layout: tuple[int, str], flags: list[str], load: str | None, folder: Path) -> Saved:
    world_size, words = layout
    losses, *_ = run_ranks(world_size, _resave, [*flags, *words.split()], load, str(folder))
    return Saved(str(folder), _tensors(str(folder)), losses)


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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return _saved(TP2_PP2_VPP2_DP2, FLAGS, None, tmp_path_factory.mktemp("saved"))


def _assert_same_tensors(one: Saved, other: Saved) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in one.tensors)
    for key, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[key].dtype
        assert torch.equal(tensor.view(torch.uint8), other.tensors[key].view(torch.uint8)), key


def _optimizer_bytes(folder: str) -> dict[str, int]:
    """By file: the bytes of the optimizer's state in it."""
    metadata = FileSystemReader(f"{folder}/iter_0000002").read_metadata()
    found: dict[str, int] = {}
    for index, place in (metadata.storage_data or {}).items():
        if index.fqn.startswith("optimizer.state."):
            found[place.relative_path] = found.get(place.relative_path, 0) + place.length
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_share_checkpoints(layout: str, saved: Saved, tmp_path: Path) -> None:
    found = _saved(LAYOUTS[layout], FLAGS, saved.folder, tmp_path)
    _assert_same_tensors(found, saved)
    assert found.losses == pytest.approx(saved.losses, rel=1e-6)
    if BUCKETS in LAYOUTS[layout][1]:
        # Every rank writes its share of the sharded state, as whole weights.
        for ranks, folder in ((4, found.folder), (8, saved.folder)):
            written = _optimizer_bytes(folder)
            assert len(written) == ranks
            assert max(written.values()) < 2 * sum(written.values()) / ranks


def test_and_back(saved: Saved, tmp_path: Path) -> None:
    """In the layout that saved it, the losses are the same to the bit, after a stay in another layout too."""
    elsewhere = _saved(LAYOUTS["PP4"], FLAGS, saved.folder, tmp_path / "elsewhere")
    back = _saved(TP2_PP2_VPP2_DP2, FLAGS, elsewhere.folder, tmp_path / "back")
    _assert_same_tensors(back, saved)
    assert back.losses == saved.losses


def test_the_fp32_copies_of_bf16_weights_go_along(tmp_path: Path) -> None:
    flags = [*FLAGS, "--bf16"]
    saved = _saved((4, "--tensor-model-parallel-size 2 " + BUCKETS), flags, None, tmp_path / "saved")
    assert any(key.startswith("optimizer.state.param.") for key in saved.tensors)
    for number, layout in enumerate(((1, ""), (2, BUCKETS))):
        _assert_same_tensors(_saved(layout, flags, saved.folder, tmp_path / str(number)), saved)


def test_what_shards_saved_goes_to_one_process_and_back_to_others(tmp_path: Path) -> None:
    """Three ranks do not divide the rows evenly; SwiGLU's first matrix is cut in the middle of gate and up, and of the
    two rows of a query norm the last rank has none."""
    flags = [*FLAGS, "--bf16", "--global-batch-size", "6", "--qk-layernorm", "--kv-channels", "2"]
    saved = _saved((3, "--use-torch-fsdp2"), flags, None, tmp_path / "shards")
    whole = _saved((1, ""), flags, saved.folder, tmp_path / "whole")
    _assert_same_tensors(whole, saved)
    other = "--use-torch-fsdp2 --tensor-model-parallel-size 2 --sequence-parallel"
    _assert_same_tensors(_saved((4, other), flags, whole.folder, tmp_path / "other"), saved)
