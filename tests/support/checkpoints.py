"""Saving and loading checkpoints of a tiny model on ranks, and what lies in their folder."""

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_ext import device
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.parallel import groups
from megatron_ext.train.build import build_run
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import Extensions
from megatron_ext.train.trainer import Trainer
from tests.support.program import tiny

FLAGS = tiny("--max-position-embeddings 16 --global-batch-size 2 --train-iters 10 --lr 1e-2")
"""A whole launch: two layers of GPT-2."""

MODEL = shlex.split("""
    --num-layers 2 --hidden-size 48 --num-attention-heads 4 --kv-channels 8 --swiglu --normalization RMSNorm
    --position-embedding-type rope --rotary-base 5000 --disable-bias-linear --vocab-size 61
""")
REST = shlex.split("""
    --seq-length 16 --mock-data --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 2
    --eval-interval 0 --device cpu
""")
SCHEDULE = shlex.split("--train-iters 10 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --lr-decay-style cosine")
"""A launch in three parts: a Llama-shaped model, data and batch, and the curves."""


def build(flags: Sequence[str], *, reads_wait: bool = False, **own: Any) -> Any:
    """Return a run, with parts of one's own as `pretrain` takes them.

    Args:
        reads_wait: whether the device says, as a GPU does, that reading its numbers waits for it.
    """
    here: Any = device.install("cpu")
    here.reads_wait = reads_wait
    return build_run(configure(flags).config, here, extensions=Extensions(**own))


def save_at(folder: str, iterations: list[int], flags: list[str]) -> int:
    """Save at each of the iterations; returns how many processes saving has started."""
    run = build(flags)
    for iteration in iterations:
        train(run, iteration - run.state.iteration)
        save_checkpoint(run, folder)
    return len(psutil.Process().children())


def load(folder: str, flags: list[str]) -> tuple[int | None, int]:
    run = build(flags)
    return load_checkpoint(run, folder), run.state.iteration


def file_hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def trained_alone(flags: list[str], steps: int = 0, **own: Any) -> Any:
    """Return a run of this process alone after some steps; the groups of the run before it end."""
    if torch.distributed.is_initialized():
        groups.destroy()
    run = build(flags, **own)
    train(run, steps)
    return run


def train(run: Any, steps: int) -> list[float]:
    """Take so many steps; return their losses."""
    trainer = Trainer(run, [])
    return [trainer.step().loss for _ in range(steps)]


def flip(path: Path, place: int | None = None, bit: int = 0) -> None:
    """Flip a bit of a file, of the byte in its middle unless another place is given."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1 << bit
    path.write_bytes(content)
