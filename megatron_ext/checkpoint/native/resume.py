"""Finds the checkpoint that a run goes on from, once, and hands it to everything that depends on it. This needs no
torch.

    search = look(typed.values)                # on every rank, before there are process groups
    search.resume                              # the configuration is made with it
    resume = agree(search, config.checkpoint)  # in `native.agreed_checkpoint`: whole, and the same on every rank

A rank cannot read all shards by itself, and before the flags are known it cannot talk to the others. `look` therefore
checks the few small files that the flags follow from, and takes the first checkpoint where these are intact. `agree`
checks all files, each rank a share. Where it settles on another checkpoint, the configuration is made once more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG, DATA, SavedCheckpoint, find_to_load
from megatron_ext.checkpoint.native.extra_files import TOKENIZER
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.config.schema import Config
from megatron_ext.errors import DataError
from megatron_ext.registry import brought
from megatron_ext.untrusted.untrusted_folder import file_inside


@dataclass(frozen=True)
class Resume(SavedCheckpoint):
    """A checkpoint to resume from, with the facts that a run takes from it besides the tensors."""

    saved: Mapping[str, Any] | None = None
    """The values of the flags that it was saved with; None where it has none that can be read."""
    data_record: Mapping[str, Any] | None = None
    """Its data record, from which its samples follow (`data.data_record`); None where it has none."""
    damaged: tuple[str, ...] = ()
    """Problem of each checkpoint that comes before it and was passed over."""
    is_snapshot: bool = False
    """Whether it is a `NewerState` that a plugin has kept in the machines' memory, and no checkpoint."""

    def gives_the_flags_of(self, other: "Resume | None") -> bool:
        """Return whether a configuration that was made with `other` is the one that this gives."""
        return other is not None and (self.path, self.saved) == (other.path, other.saved)


@dataclass(frozen=True)
class NewerState:
    """Finds and restores states of a run that a plugin keeps besides the checkpoints."""

    newest: "Callable[[Config, Search], Resume | None]"
    """Returns the state that is newer than the checkpoint of the search, with `is_snapshot`, the same on every rank;
    None where the run goes on from the checkpoint. Collective."""
    restore: Callable[[Any, int], int]
    """Puts the state of an iteration into a run, and returns the iteration."""


@dataclass(frozen=True)
class Search:
    """Findings of one look into the --load folder."""

    folder: str
    candidates: tuple[SavedCheckpoint, ...] = ()
    """The checkpoints in the order in which to try them."""
    error: DataError | OSError | None = None
    """Error by which no checkpoint was found; a folder without a checkpoint is no error."""
    resume: Resume | None = None
    """The checkpoint that the configuration is made with; not yet known to be whole."""


def search_in(folder: str | Path, step: int | None) -> Search:
    """List the checkpoints that --load and --ckpt-step ask for; nothing in them is read."""
    try:
        return Search(str(folder), tuple(find_to_load(folder, step)))
    except (DataError, OSError) as error:
        return Search(str(folder), error=error)


def look(values: Mapping[str, Any]) -> Search | None:
    """Find the checkpoint that the typed values ask for; None without --load.

    Raises:
        ConfigurationError: the checkpoint's configuration is larger or deeper than any.
        DataError: the checkpoint's configuration is no file, or a link out of the checkpoint.
    """
    if values.get("load") is None:
        return None
    search = search_in(values["load"], values.get("ckpt_step"))
    if not search.candidates:
        return search
    checkpoint = search.candidates[0]
    if not values.get("no_fallback"):
        # The first whose small files are as they were written; where no checkpoint's are, the first of all.
        checkpoint = next((one for one in search.candidates if _flags_are_intact(one.path)), checkpoint)
    resume = read_resume(checkpoint, use_checkpoint_args=bool(values.get("use_checkpoint_args")))
    return Search(search.folder, search.candidates, resume=resume)


def read_resume(checkpoint: SavedCheckpoint, *, use_checkpoint_args: bool, damaged: Sequence[str] = ()) -> Resume:
    """Read the facts that a run takes from the checkpoint besides the tensors.

    Args:
        checkpoint: where it is.
        use_checkpoint_args: whether the flags of one that Megatron-LM wrote are asked for; otherwise loading compares
            them.
        damaged: problems of the checkpoints that come before it.
    Raises:
        ConfigurationError, DataError: as `look`.
    """
    from megatron_ext.data.data_record import read_record  # imports numpy, which a run without --load waits for later

    path = checkpoint.path
    saved = read_saved(file_inside(path, CONFIG)) if _is_listed(path, CONFIG) else None
    if saved is None and use_checkpoint_args:
        read = (flags_of(path) for flags_of in brought("saved_flags"))
        saved = next((values for values in read if values is not None), None)
    return Resume(path, checkpoint.iteration, checkpoint.warning, saved, read_record(path / DATA), tuple(damaged))


def _flags_are_intact(checkpoint: Path) -> bool:
    """Return whether the files that the flags and the data follow from are as the manifest says, if there is one."""
    try:
        files = checkpoint_manifest.read(checkpoint)
    except (OSError, ValueError, DataError):
        return False
    small = {
        name: entry
        for name, entry in (files or {}).items()
        if name in (CONFIG, DATA) or name.startswith(f"{TOKENIZER}/")
    }
    return not checkpoint_manifest.problems(checkpoint, small)


def _is_listed(folder: Path, name: str) -> bool:
    """Return whether the folder has such an entry, even one that leads nowhere."""
    return (folder / name).is_symlink() or (folder / name).exists()
