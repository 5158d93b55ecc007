"""What one layout saves, another loads and saves again: the tensors of both, and the losses that follow."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.forkserver.ranks import run_ranks
from tests.support.checkpoints import build, train

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --seq-length 16 --max-position-embeddings 16 --mock-data --vocab-size 61
    --make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 12 --lr 1e-3
    --attention-dropout 0 --hidden-dropout 0 --eval-interval 0 --device cpu
""")
STEPS = 2


@dataclass(frozen=True)
class Saved:
    folder: str
    tensors: dict[str, torch.Tensor]
    losses: list[float]
    """Of the steps after the save."""


def resave(flags: list[str], load: str | None, save: str | None, steps: int = STEPS) -> list[float]:
    """Load, or take two steps; save, where there is a folder; and go on for some steps, whose losses are returned."""
    run = build(flags)
    if load is None:
        train(run, 2)
    else:
        assert load_checkpoint(run, load) == 2
    if save is not None:
        save_checkpoint(run, save)
    return train(run, steps)


def saved_by(layout: tuple[int, str], flags: list[str], load: str | None, folder: Path, steps: int = STEPS) -> Saved:
    world_size, words = layout
    losses, *_ = run_ranks(world_size, resave, [*flags, *words.split()], load, str(folder), steps)
    return Saved(str(folder), tensors_of(str(folder)), losses)


def tensors_of(folder: str, iteration: int = 2) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, whole, as torch itself reads it."""
    reader = FileSystemReader(f"{folder}/iter_{iteration:07}")
    tensors: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_tensors(one: Saved, other: Saved) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in one.tensors)
    for key, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[key].dtype
        assert torch.equal(tensor.view(torch.uint8), other.tensors[key].view(torch.uint8)), key
