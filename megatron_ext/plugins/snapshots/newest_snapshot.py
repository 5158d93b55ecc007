"""Finds the newest snapshot that all ranks can go on from, before anything is built.

Ranks may be on other machines than when it was written, or on a new one. So every rank lists the files on its machine;
a rank without its own file gets it from a rank that has the file or a copy.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.agreed_checkpoint import told_by_the_first_rank
from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG, DATA, SavedCheckpoint, iteration_folder
from megatron_ext.checkpoint.native.lock import name_of_contents
from megatron_ext.checkpoint.native.resume import Resume, Search, read_resume
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.schema import CheckpointConfig, Config
from megatron_ext.plugins.snapshots import rank_file
from megatron_ext.plugins.snapshots.snapshot_folder import (
    file_of,
    folder_of,
    iterations,
    layout_of,
    ranks_at,
    send_file,
)
from megatron_ext.terminal import warn


def newest_snapshot(config: Config, search: Search) -> Resume | None:
    """Return the snapshot to go on from; None where the checkpoint in --load is newer or asked for. Collective.

    Args:
        search: of --load, on the first rank.
    """
    folder = folder_of(config)
    if folder is None or not _goes_on(config.checkpoint):
        return None
    first = told_by_the_first_rank(lambda: search.candidates[0].iteration if search.candidates else 0)
    seen = _seen(folder, config, checkpoint=first, contents=contents_of(config))
    world_size = torch.distributed.get_world_size()
    told: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(told, seen)
    for iteration in sorted({iteration for answers in told for iteration in answers}, reverse=True):
        answers = [answer.get(iteration, {}) for answer in told]
        reason = _unusable(answers, world_size) or _bring(folder, iteration, answers) or _damaged(folder, iteration)
        if reason is None:
            return told_by_the_first_rank(lambda iteration=iteration: _resume(folder, iteration, config))
        if torch.distributed.get_rank() == 0:
            warn(f"the snapshot of iteration {iteration} in {folder} is not used: {reason}")
    return None


def _goes_on(flags: CheckpointConfig) -> bool:
    """Return whether the run resumes from the newest state, and from all of it."""
    left_out = (flags.finetune, flags.no_load_optim, flags.no_load_rng, flags.ckpt_step is not None)
    return (
        flags.load is not None and Path(flags.load).resolve() == Path(flags.save or "").resolve() and not any(left_out)
    )


def contents_of(config: Config) -> str | None:
    """Return the name of the contents of --save, by which its snapshots are known. Collective."""
    told = told_by_the_first_rank(lambda: (name_of_contents(config.checkpoint.save or ""),))
    return told[0]


def _seen(folder: Path, config: Config, *, checkpoint: int, contents: str | None) -> dict[int, dict[int, str]]:
    """Return the snapshots on this rank's machine that are newer than the checkpoint: iteration -> rank -> why the file
    cannot be used, empty if it can."""
    layout, save = layout_of(config), config.checkpoint.save or ""
    return {
        iteration: {
            rank: _why_not(header, layout, checkpoint) or _of_another_course(header or {}, save, contents)
            for rank, path in ranks_at(folder, iteration).items()
            for header in [rank_file.read_header(path)]
        }
        for iteration in iterations(folder)
        if iteration > checkpoint
    }


def _why_not(header: Mapping[str, Any] | None, layout: Mapping[str, Any], checkpoint: int) -> str:
    try:
        if header is None:
            return "it has a file that is not whole"
        then = header["layout"]
        different = [name for name in layout if then.get(name) != layout[name]]
        if different:
            listed = ", ".join(_difference(name, then.get(name), layout[name]) for name in different)
            return f"it is of another layout ({listed})"
        if type(header["checkpoint"]) is not int:
            raise TypeError
        if header["checkpoint"] > checkpoint:
            return (
                f"it follows on the checkpoint of iteration {header['checkpoint']}, which --load does not begin with "
                f"(but with {checkpoint})"
            )
    except (AttributeError, KeyError, TypeError):
        return "it has a file that is not whole"
    return ""


_PRECISIONS = {"float32": "neither --bf16 nor --fp16", "bfloat16": "--bf16", "float16": "--fp16"}


def _difference(name: str, then: Any, now: Any) -> str:
    """Return the flags of a layout that is another one now."""
    if name == "params_dtype":
        return f"{_PRECISIONS.get(then, then)}, now {_PRECISIONS[now]}"
    return f"{flag_of(name)} {then}, now {now}"


def _of_another_course(header: Mapping[str, Any], save: str, contents: str | None) -> str:
    """Return why a whole snapshot belongs to a run that --save does not hold any more; empty where it belongs to this
    run."""
    if None not in (contents, header.get("contents")) and header["contents"] != contents:
        return f"it is of a run that was in --save {save} before it was emptied"
    checkpoint = iteration_folder(save, header["checkpoint"])
    manifest = checkpoint_manifest.name_of(checkpoint)  # None for a checkpoint that has expired
    if None not in (manifest, header.get("manifest")) and header["manifest"] != manifest:
        return f"it follows on another checkpoint than {checkpoint}, which was saved in its place"
    return ""


def _unusable(answers: list[dict[int, str]], world_size: int) -> str | None:
    """Return why the files of all machines together are no snapshot; None where they are one."""
    reasons = [reason for answer in answers for _, reason in sorted(answer.items()) if reason]
    if reasons:
        return reasons[0]
    missing = sorted(set(range(world_size)) - {rank for answer in answers for rank in answer})
    return f"that of rank {missing[0]} is on no machine" if missing else None


def _bring(folder: Path, iteration: int, answers: list[dict[int, str]]) -> str | None:
    """Send files to the ranks that have none; return why that failed. Collective."""
    without = [rank for rank, answer in enumerate(answers) if rank not in answer]
    if not without:
        return None
    group = torch.distributed.new_group(backend="gloo")
    me, problem = torch.distributed.get_rank(), None
    for rank in without:
        sender = next(other for other, answer in enumerate(answers) if rank in answer)
        if me in (sender, rank):
            source = ranks_at(folder, iteration).get(rank) if me == sender else None
            target = None if me == sender else file_of(folder, iteration, rank)
            problem = send_file(source, target, sender, rank, group) or problem
    return _first(problem)


def _damaged(folder: Path, iteration: int) -> str | None:
    """Return which rank's file is damaged, or None; a rank's file counts as intact where its copy is. Collective."""
    rank = torch.distributed.get_rank()
    own, copy = file_of(folder, iteration, rank), file_of(folder, iteration, rank, copy=True)
    if rank_file.is_intact(own):
        return _first(None)
    if rank_file.is_intact(copy):
        copy.replace(own)
        return _first(None)
    return _first(f"{own} is damaged")


def _resume(folder: Path, iteration: int, config: Config) -> Resume:
    """Return the snapshot in the form of a checkpoint to resume from. Called on the first rank alone."""
    path = iteration_folder(folder, iteration)
    header = rank_file.read_header(file_of(folder, iteration, 0)) or {}
    for name in (CONFIG, DATA):
        if header.get(name) is not None:
            (path / name).write_text(header[name], encoding="utf-8")
    resume = read_resume(SavedCheckpoint(path, iteration), use_checkpoint_args=config.checkpoint.use_checkpoint_args)
    return replace(resume, is_snapshot=True)


def _first(problem: str | None) -> str | None:
    """Return the problem of the first rank that has one. Collective."""
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    return next((one for one in problems if one is not None), None)
