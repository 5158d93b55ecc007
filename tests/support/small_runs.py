"""Small real runs in the process of the test: a model of two layers and synthetic data, three steps in 0.1 s.

`pretrain([*MODEL, ...])` runs all of one; `built` gives a test that takes steps by hand the parts of one that is ready
for its first step.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ext import device
from megatron_ext.parallel import groups
from megatron_ext.train.build import build_run
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import Extensions
from megatron_ext.train.run import Run

WITHOUT_LENGTH = shlex.split(
    "--device cpu --mock-data --vocab-size 64 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 "
    "--eval-interval 2 --eval-iters 1 --exit-signal-deadline 60 --num-workers 0"
)
MODEL = [*WITHOUT_LENGTH, "--train-iters", "3"]
"""Flags of a run of three steps of four samples, each of 16 tokens, in two microbatches."""


@contextmanager
def built(flags: str = "", *, reads_wait: bool = False, **own: Any) -> Iterator[Run]:
    """Return a context with a run of these flags next to MODEL, ready for its first step, in a group of one rank.

    Args:
        flags: later ones override those of MODEL.
        reads_wait: whether the device says, as a GPU does, that reading its numbers waits for it.
        own: a user's own parts of the run, see `Extensions`.
    """
    words = shlex.split(flags)
    config = configure([*(WITHOUT_LENGTH if "--train-samples" in words else MODEL), *words]).config
    here: Any = device.install("cpu")
    before, here.reads_wait = here.reads_wait, reads_wait
    try:
        groups.start(config.layout, here)
        run = build_run(config, here, extensions=Extensions(**own))
        try:
            yield run
        finally:
            run.release_graph()
            run.loaders.close()
    finally:
        here.reads_wait = before
        groups.destroy()


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Return copies of the weights, by the names of their parameters."""
    return {name: weight.detach().clone() for chunk in run.chunks for name, weight in chunk.named_parameters()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether all of the weights have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
