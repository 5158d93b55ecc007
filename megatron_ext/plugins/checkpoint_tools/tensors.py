"""Reads the tensors of a checkpoint, whole and one at a time, in one process and without a model.

tensors = Tensors("checkpoints/run/iter_0000100")
for name in tensors.names():
    print(name, tensors.shape(name), tensors.read(name).norm())
"""

import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_ext.checkpoint.native.safe_reading import UNREADABLE, SafeReader, no_code_from_files
from megatron_ext.errors import DataError


class Tensors:
    """The tensors of a checkpoint. Raises DataError where the folder holds no checkpoint that can be read."""

    def __init__(self, checkpoint: str | Path):
        self.path = Path(checkpoint)
        self._reader = _Reader(self.path)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise DataError(f"{self.path} is no checkpoint that can be read: {error}") from error
        self._entries = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> list[str]:
        """Return the global names: parameters, then the optimizer's state (`optimizer.state.exp_avg.<parameter>`)."""
        return sorted(self._entries, key=lambda name: (name.startswith("optimizer."), name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entries[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._entries[name].properties.dtype

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor, on the CPU.

        Raises:
            DataError: the tensor's files do not hold all of it, or cannot be read.
        """
        self._check_extent(name)
        tensors = {name: torch.empty(self.shape(name), dtype=self.dtype(name))}
        with self._reading(name):
            load(tensors, storage_reader=self._reader, no_dist=True)
        return tensors[name]

    def _check_extent(self, name: str) -> None:
        """Check that files hold all elements: no memory is taken for elements that no file has."""
        entry, places = self._entries[name], self._reader.read_metadata().storage_data
        for chunk in entry.chunks:
            stored = places[MetadataIndex(name, chunk.offsets)]
            size = (self.path / stored.relative_path).stat().st_size
            wanted = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if wanted > stored.length or stored.offset + stored.length > size:
                raise DataError(
                    f"{self.path}: {name} cannot be read: {stored.relative_path} has {size:,} bytes, and no room for "
                    f"{wanted:,} at {stored.offset:,}. Take an earlier checkpoint."
                )
        total = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if total != math.prod(entry.size):
            raise DataError(
                f"{self.path}: {name} cannot be read: its files hold {total:,} elements of {math.prod(entry.size):,}. "
                "Take an earlier checkpoint."
            )

    def common(self) -> dict[str, Any]:
        """Return the entries that are no tensors: iteration, training state, versions.

        Raises:
            DataError: it cannot be read.
        """
        with self._reading("its common state"):
            common = dist_checkpointing.load_common_state_dict(str(self.path))
            if type(common) is not dict:
                raise pickle.UnpicklingError("it is no table of values")
            return common

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn the errors of megatron-core and torch into a DataError."""
        try:
            with no_code_from_files(self.path), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group, which is on purpose
                yield
        except UNREADABLE as error:
            raise DataError(f"{self.path}: {name} cannot be read: {error}") from error


def differences(one: Tensors, other: Tensors) -> Iterator[str]:
    """Yield a line for every tensor that is not bitwise the same in both."""
    names = {**dict.fromkeys(one.names()), **dict.fromkeys(other.names())}
    for name in names:
        if name not in one.names() or name not in other.names():
            yield f"{name}: only in {(one if name in one.names() else other).path}"
        elif (one.shape(name), one.dtype(name)) != (other.shape(name), other.dtype(name)):
            yield f"{name}: {_form(one, name)} and {_form(other, name)}"
        else:
            first, second = one.read(name), other.read(name)
            if not torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8)):
                gap = (first.double() - second.double()).abs()
                relative = gap.norm() / max(first.double().norm().item(), 1e-300)
                yield f"{name}: largest difference {gap.max():.3e}, norm of the difference {relative:.3e} of the norm"


def _form(tensors: Tensors, name: str) -> str:
    return f"{list(tensors.shape(name))} {str(tensors.dtype(name)).removeprefix('torch.')}"


class _Reader(SafeReader):
    """A reader that reads the metadata once."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
