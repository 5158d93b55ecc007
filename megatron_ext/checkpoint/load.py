"""Read a checkpoint."""

import pickle
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint import contents
from megatron_ext.checkpoint.folder import Found, find_latest
from megatron_ext.checkpoint.safe_reading import no_code_from_files
from megatron_ext.checkpoint.saveable import Saveable
from megatron_ext.errors import DataError, StorageError, TrainingError

# What the engine and torch raise for a file that is cut short, altered or missing, or for other tensors than wanted.
_UNREADABLE = (
    CheckpointException,
    CheckpointingException,
    pickle.UnpicklingError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
)


def load_checkpoint(run: Saveable, folder: str | Path) -> int | None:
    """Put the latest checkpoint of `folder` into `run`. Collective.

    In the layout that saved it, the run then goes on exactly as if it had not been interrupted.

    Returns:
        Its iteration; None where the folder holds no checkpoint.
    Raises:
        DataError: what is there cannot be read, or is of another model.
        StorageError: the folder cannot be read.
    """
    found = _agree_on_latest(run, folder)
    if found is None:
        return None
    if found.warning and run.rank == 0:
        print(f"warning: {found.warning}", file=sys.stderr)
    try:
        with no_code_from_files():
            _read(run, found.path)
    except _UNREADABLE as error:
        raise DataError(
            f"the checkpoint {found.path} cannot be read as one of this model: {_reason(error)}. Compare its "
            "config.yaml with the flags given; if they agree, it is damaged: move it away, and the one before is used."
        ) from error
    return found.iteration


def _read(run: Saveable, path: Path) -> None:
    common = dist_checkpointing.load_common_state_dict(str(path))
    same_grid = common["rng_grid"] == contents.rng_grid(run)
    if not same_grid and run.rank == 0:
        print(
            f"warning: {path} was saved by (pipeline, data, tensor) = {tuple(common['rng_grid'])} ranks: dropout goes "
            "on from new random numbers",
            file=sys.stderr,
        )
    to_load = contents.to_load(run, rng=same_grid)
    # Not every rank reads every tensor: no need for the engine to see that they all do.
    loaded = dist_checkpointing.load(to_load.state_dict, str(path), validate_access_integrity=False)
    contents.restore(run, to_load, loaded)  # pyright: ignore[reportArgumentType]


def _agree_on_latest(run: Saveable, folder: str | Path) -> Found | None:
    """The first rank looks and tells: on a network file system others may still see an older folder."""
    answer: list[Found | TrainingError | None] = [None]
    if run.rank == 0:
        try:
            answer = [find_latest(folder)]
        except DataError as error:
            answer = [error]
        except OSError as error:
            answer = [StorageError(f"--load {folder}: {error.strerror}. Fix the folder, or give another one.")]
    torch.distributed.broadcast_object_list(answer, src=0)
    [found] = answer
    if isinstance(found, TrainingError):
        raise found
    return found


def _reason(error: BaseException) -> str:
    """The engine's own words, the first of many lines."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}"
