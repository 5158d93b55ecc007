"""Compares a checkpoint with its manifest, all ranks together: each reads a share of the files."""

from pathlib import Path

import torch

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.errors import DataError
from megatron_ext.untrusted.untrusted_folder import check_folder


def damage(checkpoint: Path) -> list[str] | None:
    """Return what is wrong with the checkpoint; empty where it is as it was written. Collective; equal on every rank.

    Returns:
        None where it has no manifest, so that nothing can be said.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    damages: list[str] | None
    try:
        if rank == 0:
            check_folder(checkpoint)
        files = checkpoint_manifest.read(checkpoint)
    except (OSError, ValueError, DataError) as error:
        files, damages = {}, [str(error)]
    else:
        damages = None if files is None else []
    if files:
        by_size = sorted(files, key=lambda name: (files[name]["bytes"], name))
        own = {name: files[name] for name in by_size[rank::world_size]}
        damages = checkpoint_manifest.problems(checkpoint, own)
    answers: list[list[str] | None] = [None] * world_size
    torch.distributed.all_gather_object(answers, damages)
    if all(answer is None for answer in answers):
        return None
    return list(dict.fromkeys(problem for answer in answers for problem in answer or ()))
