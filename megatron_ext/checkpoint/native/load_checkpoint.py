"""Reads a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint.native import checkpoint_manifest, checkpoint_state_dict, masters
from megatron_ext.checkpoint.native.agreed_checkpoint import first_whole
from megatron_ext.checkpoint.native.checkpoint_folder import (
    CONFIG,
    RELEASE,
    SavedCheckpoint,
    iteration_folder,
)
from megatron_ext.checkpoint.native.other_formats import format_of
from megatron_ext.checkpoint.native.resume import search_in
from megatron_ext.checkpoint.native.safe_reading import UNREADABLE, SafeReader, no_code_from_files
from megatron_ext.checkpoint.native.snapshot import Saveable
from megatron_ext.checkpoint.native.upcycling import Upcycling, is_of_a_dense_model, repeat_routers
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.errors import ConfigurationError, DataError, listed
from megatron_ext.parts import own_parameters
from megatron_ext.resilience.process_end import is_lost_peer
from megatron_ext.terminal import warn
from megatron_ext.untrusted.untrusted_folder import file_inside


def load_checkpoint(run: Saveable, folder: str | Path) -> int | None:
    """Find a checkpoint in `folder`, or the one that it is, and load it. Collective.

    This is for a run whose flags and data follow from no checkpoint; `pretrain` loads the one that they follow from.
    A checkpoint that is not as its manifest says is passed over with a warning, for the next newest, unless
    --no-fallback forbids it.

    Returns:
        The checkpoint's iteration; None where the folder holds no checkpoint.
    Raises:
        DataError, StorageError: as `first_whole` and `load_saved`.
    """
    flags = run.config.checkpoint
    chosen = first_whole(lambda: search_in(folder, flags.ckpt_step), flags)
    if chosen is None:
        return None
    return load_saved(run, chosen[0])


def load_saved(run: Saveable, checkpoint: SavedCheckpoint) -> int:
    """Put the tensors and the progress of the checkpoint, which all ranks have agreed on, into `run`. Collective.

    In the layout that saved it, the run then goes on exactly as if it had not been interrupted, unless --finetune and
    the like leave parts of it aside.

    Returns:
        The iteration after which the state was saved, whatever the folder's name says.
    Raises:
        DataError: the checkpoint cannot be read, or is of another model.
        RuntimeError: another rank was lost meanwhile.
    """
    try:
        with no_code_from_files(checkpoint.path), run.sharding.weights_in_place(run.chunks):
            return _read(run, checkpoint)
    except UNREADABLE as error:
        if is_lost_peer(error):
            raise
        reason = _reason(_refusal_of_metadata(checkpoint) if "metadata is None" in str(error) else error)
        raise DataError(
            f"the checkpoint {checkpoint.path} cannot be read as one of this model: {reason}. {_what_to_do(checkpoint)}"
        ) from error


def _what_to_do(checkpoint: SavedCheckpoint) -> str:
    if checkpoint_manifest.name_of(checkpoint.path) is None:  # or all files were compared with it
        return (
            "Compare its config.yaml with the flags given; if they agree, it is damaged: move it away, and the one "
            "before is used."
        )
    return (
        "All its files are as they were written, and it is not damaged. Compare its config.yaml with the flags given, "
        "and its versions.json with the versions installed."
    )


def _refusal_of_metadata(checkpoint: SavedCheckpoint) -> BaseException:
    """Return why `.metadata` was refused, which torch swallows: it looks for another file, and has none."""
    try:
        SafeReader(checkpoint.path).read_metadata()
    except (*UNREADABLE, DataError) as error:
        return error
    return DataError("its .metadata could not be read at first; a second time it could")


def _read(run: Saveable, checkpoint: SavedCheckpoint) -> int:
    path = checkpoint.path
    common = dist_checkpointing.load_common_state_dict(str(path))
    iteration = _iteration(run, checkpoint, common)
    _require_own_layers(run, checkpoint, common)
    other = format_of(common)
    translated = common if other is None else other.as_ours(run, path, common)
    parts, saved = _wanted(run, checkpoint, translated), _metadata(path)
    is_dense = run.config.checkpoint.moe_use_upcycling and is_of_a_dense_model(saved)
    if is_dense:
        repeat_routers(run)
    to_load = checkpoint_state_dict.to_load(run, parts)
    upcycling = Upcycling(run, to_load) if is_dense else None
    saved_name = str if other is None else partial(other.saved_name, saved=saved)
    changed = masters.changed_precisions(run, to_load.state_dict, saved, saved_name)
    if changed and not (parts.optimizer or is_dense):
        parts = replace(parts, masters=True)
        checkpoint_state_dict.add_masters(run, to_load)
    apart = masters.read_from_masters(to_load.state_dict, saved, saved_name) if changed else {}
    _say_what_is_lost(run, path, changed, saved)
    without: dict[str, list[str]] = {}
    if other is not None:
        without = other.rename(to_load.state_dict, saved)
        other.rename(apart, saved)
    loaded = _read_tensors(run, path, to_load.state_dict)
    if apart:
        loaded.setdefault("optimizer", {}).update(_read_tensors(run, path, apart)["optimizer"])
    if other is not None:
        loaded |= {name: value for name, value in translated.items() if name != "optimizer"}
        for chunk, names in without.items():
            loaded[chunk] |= dict.fromkeys(names)
    if upcycling is not None:
        upcycling.finish(loaded)
    checkpoint_state_dict.restore(run, to_load, parts, loaded)
    return iteration


def _iteration(run: Saveable, checkpoint: SavedCheckpoint, common: Mapping[str, Any]) -> int:
    """Return the iteration of the state, which is to be the one in the folder's name.

    Raises:
        DataError: it is not, and flags depend on the name.
    """
    path, said = checkpoint.path, checkpoint.iteration
    if path.name == RELEASE:
        return said
    iteration = common.get("iteration", said)
    if iteration == said:
        return said
    problem = f"{path} holds the state of iteration {iteration}: folders were renamed or swapped"
    own = iteration_folder("", iteration).name
    if run.config.checkpoint.ckpt_step is not None:
        raise DataError(
            f"--ckpt-step {said}: {problem}. Rename it to {own}, or leave --ckpt-step out and use --load {path}."
        )
    if run.config.training.stages is not None:
        raise DataError(f"--stages {run.config.training.stages}: {problem}, and the stage is not its own. Rename it.")
    _warn(run, f"{problem}; going on from iteration {iteration}. Rename it to {own}")
    return iteration


def _read_tensors(run: Saveable, path: Path, state_dict: dict[str, Any]) -> dict[str, Any]:
    # Not every rank reads every tensor: no need for the engine to see that they all do.
    loaded: Any = dist_checkpointing.load(state_dict, str(path), _reading(run), validate_access_integrity=False)
    return loaded


def _say_what_is_lost(run: Saveable, path: Path, changed: list[str], saved: Mapping[str, Any]) -> None:
    """Warn of 16-bit weights that a run in another precision begins with, where no fp32 master has their values before
    rounding."""
    rounded = [dtype for dtype in changed if dtype != "float32"]
    if rounded and not masters.are_saved(saved):
        _warn(
            run,
            f"{path} holds its weights in {listed(rounded)} alone, without fp32 masters that can be read: this run, in "
            f"{run.config.training.params_dtype}, begins with the rounded weights",
        )


def _metadata(path: Path) -> Any:
    """Return the checkpoint's metadata of its tensors, by name."""
    return SafeReader(path).read_metadata().state_dict_metadata


def _require_own_layers(run: Saveable, checkpoint: SavedCheckpoint, common: Mapping[str, Any]) -> None:
    """Require the layers that the checkpoint was trained with, where they have parameters of their own."""
    lacking = set(common.get(checkpoint_state_dict.OWN_PARAMETERS, ())) - set(own_parameters.names(run.config))
    if lacking:
        raise ConfigurationError(
            f"the checkpoint {checkpoint.path} was trained with layers of one's own, whose parameters "
            f"{', '.join(sorted(lacking))} this model does not have; start it from the script that brings them "
            "(layer_spec= and layer_parameters=)"
        )


def _reading(run: Saveable) -> Any:
    """Return megatron-core's load strategy: every rank reads all that it needs, or data-parallel ranks read
    together."""
    own = TorchDistLoadShardedStrategy()
    if not run.config.checkpoint.ckpt_fully_parallel_load:
        return own
    # The engine's broadcast makes its buffers on a GPU.
    exchange = "broadcast" if run.device.kind == "cuda" else "gather_object"
    return FullyParallelLoadStrategyWrapper(own, run.groups.dp_cp, exchange_algo=exchange)


def _wanted(run: Saveable, checkpoint: SavedCheckpoint, common: Mapping[str, Any]) -> checkpoint_state_dict.Parts:
    """Return the parts of the checkpoint that the flags ask to load."""
    path = checkpoint.path
    # Made from a Hugging Face model, or released by somebody: training begins with a new optimizer.
    if common.get("weights_only") or checkpoint.path.name == RELEASE:
        return checkpoint_state_dict.Parts(optimizer=False, rng=False, progress=False)
    flags = run.config.checkpoint
    optimizer = not (flags.finetune or flags.no_load_optim)
    if optimizer and "optimizer_step" not in common:
        raise DataError(
            f"the checkpoint {path} was saved without optimizer state; add --no-load-optim to go on with a new one, "
            "or --finetune to begin at iteration 0."
        )
    was, decay = _saved(path, "optimizer"), _saved(path, "ema_decay")
    if optimizer and was not in (None, run.config.optimizer.optimizer):
        raise DataError(
            f"the checkpoint {path} has the state of --optimizer {was}, from which --optimizer "
            f"{run.config.optimizer.optimizer} cannot go on; use --optimizer {was}, or add --no-load-optim to go on "
            "with a new state."
        )
    rng = not (flags.finetune or flags.no_load_rng)
    grid = common.get("rng_grid")
    if rng and grid != checkpoint_state_dict.rng_grid(run):
        whose = (
            f"{path} was saved by (pipeline, data, tensor) = {tuple(grid)} ranks"
            if grid
            else f"{path} holds no random state that can be used here"
        )
        if run.config.model.attention_dropout or run.config.model.hidden_dropout:
            _warn(run, f"{whose}: dropout goes on from new random numbers")
        rng = False
    averages = not run.config.optimizer.ema_decay or bool(decay)
    if optimizer and not averages:
        _warn(run, f"{path} holds no averages of --ema-decay, which begin as its weights")
    return checkpoint_state_dict.Parts(optimizer, rng, progress=not flags.finetune, averages=averages)


def _saved(path: Path, name: str) -> Any:
    """Return a flag of the run that saved the checkpoint; None where the checkpoint has no configuration file."""
    saved = read_saved(file_inside(path, CONFIG)) if (path / CONFIG).exists() else None
    return None if saved is None else saved.get(name, options_by_name()[name].default)


def _warn(run: Saveable, text: str) -> None:
    if run.rank == 0:
        warn(text)


def _reason(error: BaseException) -> str:
    """Return the first line of megatron-core's own message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip() or type(error).__name__
    # torch's first lines on a pickle that it refuses say how to run it all the same; what it asks for comes after them.
    asked = [line.partition(". Please use")[0] for line in text.splitlines() if " GLOBAL " in line]
    text = asked[0] if asked else text
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}"
