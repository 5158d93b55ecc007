"""Checkpoints that other programs wrote, which plugins bring to the extension point `checkpoint_formats`."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.checkpoint.native.snapshot import Saveable
from megatron_ext.registry import brought


class OtherFormat(Protocol):
    """A program whose checkpoints are read as ours."""

    def wrote(self, common: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this common state is the program's."""
        ...

    def as_ours(self, run: Saveable, path: Path, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the common state in our terms.

        Raises:
            DataError: the checkpoint is of another model, or its optimizer's state cannot be read.
        """
        ...

    def saved_name(self, name: str, saved: Collection[str]) -> str:
        """Return the name that the checkpoint has one of our tensors under; where it has none, ours."""
        ...

    def rename(self, state_dict: dict[str, Any], saved: Collection[str]) -> dict[str, list[str]]:
        """Give the tensors to be read the names that the checkpoint has them under, in place.

        Returns:
            By chunk of the model, the entries that were taken out because the checkpoint has none.
        """
        ...


def format_of(common: Mapping[str, Any]) -> OtherFormat | None:
    """Return the program that wrote a checkpoint with this common state; None for one of ours."""
    return next((one for one in brought("checkpoint_formats") if one.wrote(common)), None)
