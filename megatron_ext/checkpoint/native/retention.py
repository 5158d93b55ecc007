"""Decides which checkpoints to keep: the last --keep-last-checkpoints, and every --save-retain-interval steps one for
good."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_ext.checkpoint.native.agreed_checkpoint import damage
from megatron_ext.checkpoint.native.checkpoint_folder import iteration_folder, remove, saved_iterations
from megatron_ext.checkpoint.native.snapshot import Saveable
from megatron_ext.terminal import warn


def expired(saved: Sequence[int], newest: int, keep_last: int | None, retain_interval: int | None) -> list[int]:
    """Return the iterations that may go once `newest` is saved; those above it belong to another course of the run and
    stay.

    With a retain interval alone, one checkpoint is kept besides, as in Megatron-LM. Without either, all are.
    """
    if keep_last is None and retain_interval is None:
        return []
    older = [iteration for iteration in sorted(saved) if iteration <= newest]
    return [
        iteration
        for iteration in older[: -(keep_last or 1)]
        if retain_interval is None or iteration % retain_interval != 0
    ]


def remove_expired(run: Saveable, folder: str | Path, newest: int) -> None:
    """Remove checkpoints that the flags do not keep, if `newest` proves to be whole when it is read back.
    Collective."""
    flags = run.config.checkpoint
    answer: list[list[int]] = [[]]
    if run.rank == 0:
        # Of a link somebody has put the checkpoint elsewhere, to keep it.
        saved = [
            iteration for iteration in saved_iterations(folder) if not iteration_folder(folder, iteration).is_symlink()
        ]
        answer = [expired(saved, newest, flags.keep_last_checkpoints, flags.save_retain_interval)]
    torch.distributed.broadcast_object_list(answer, src=0)
    [old] = answer
    if not old:
        return
    problems = damage(iteration_folder(folder, newest))
    if run.rank != 0:
        return
    if problems or problems is None:
        text = ", ".join(problems or ["no manifest"])
        warn(f"{iteration_folder(folder, newest)} is not whole ({text}): earlier checkpoints are kept. Check the disk")
        return
    for iteration in old:
        try:
            remove(folder, iteration)
        except OSError as error:
            warn(f"{iteration_folder(folder, iteration)} cannot be removed: {error.strerror}")
