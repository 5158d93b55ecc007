"""Finds the weights of a checkpoint, as places in its files, for one process without torch."""

import io
import math
import pickle
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron_ext.checkpoint.dtypes import ARRAYS, DTYPES, WIDTH
from megatron_ext.checkpoint.native import checkpoint_manifest, torch_dist
from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG, checkpoint_at, without_checkpoint
from megatron_ext.checkpoint.native.torch_archive import check_archive, place_of_elements
from megatron_ext.checkpoint.native.torch_dist import Chunk
from megatron_ext.config.derived.optimizer_traits import AVERAGE
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parts.catalogue import parameters, states
from megatron_ext.plugins.checkpoint_tools.saved_config import saved_config
from megatron_ext.plugins.checkpoint_tools.single_process import stacked
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.registry import written_as
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.untrusted.untrusted_folder import check_folder, file_inside

if TYPE_CHECKING:
    import numpy.typing as npt


_AVERAGES = f"optimizer.state.{AVERAGE}."


@dataclass(frozen=True)
class Piece:
    """A saved part of a parameter: [rows, columns], or [rows] of a vector."""

    row: int
    """Index of its first element in the parameter."""
    column: int
    shape: tuple[int, ...]
    file: str
    offset: int
    """Offset of its first element in the file."""
    array: "npt.NDArray | None" = None
    """The elements themselves, where they do not lie in order in the file."""


class SavedModel:
    """The weights and the configuration of a checkpoint.

    Args:
        folder: a `--save` folder, whose latest checkpoint is taken, or one checkpoint in it.
        averages: whether to take the averages of the weights in their place.

    Raises:
        ConfigurationError: there is no checkpoint, its `config.yaml` is missing, or it has no averages.
        DataError: the checkpoint is damaged.
    """

    _averaged: Collection[str] = ()
    """Names of the tensors whose averages are taken."""

    def __init__(self, folder: str | Path, *, averages: bool = False):
        path = checkpoint_at(Path(folder))
        if path is None:
            raise ConfigurationError(f"--load {without_checkpoint(folder)}")
        self.path = path
        self._elements = lru_cache(64)(_elements)  # a chunk may hold several experts
        check_folder(self.path)
        self.config = saved_config(self.path)
        try:
            with file_inside(self.path, ".metadata").open("rb") as file:
                self.tensors = torch_dist.read(file)
        except (OSError, pickle.UnpicklingError) as error:
            raise DataError(f"{self.path}/.metadata cannot be read: {error}. Take an earlier checkpoint.") from error
        self._averaged = {name.removeprefix(_AVERAGES) for name in self.tensors if averages and _AVERAGES in name}
        if averages and not self._averaged:
            raise ConfigurationError(
                f"{self.path} holds no averages of the weights, which a run with --ema-decay saves; leave --ema out"
            )

    def saved_as(self, key: str) -> str:
        """Return the name of a saved tensor, or of its average where these are taken."""
        return f"{_AVERAGES}{key}" if key in self._averaged else key

    def _key(self, name: str) -> str:
        """Return the name of the tensor that holds a parameter, or its average."""
        return self.saved_as(stacked(self.config, name).key)

    @cached_property
    def written(self) -> tuple[Family, Config]:
        """The family that the model is written as, and the configuration of the exported model (`written_as`)."""
        return written_as(self.config)

    def check(self) -> None:
        """Check that the checkpoint holds every parameter that is exported.

        Raises:
            ConfigurationError: a layer has parameters of its own, which no family has.
            DataError: a tensor is missing, has another shape, or a dtype that is not supported; all of them are named.
        """
        self._require_our_layers()
        problems = []
        family, config = self.written
        for mapping in state_dict_mapping(config, family):
            parameter = mapping.parameter
            key, sizes = self._key(parameter.name), stacked(self.config, parameter.name).sizes
            expected = (*sizes, *parameter.shape)
            entry = self.tensors.get(key)
            if entry is None:
                problems.append(f"{key} is missing; it should have shape {list(expected)}")
            elif entry.size != expected:
                problems.append(f"{key} has shape {list(entry.size)}; by {CONFIG} it should be {list(expected)}")
            elif entry.dtype not in WIDTH:
                problems.append(f"{key} has dtype {entry.dtype}; supported are {', '.join(DTYPES.values())}")
        if problems:
            problems = list(dict.fromkeys(problems))
            raise DataError(f"{self.path} does not match its {CONFIG}: {'; '.join(problems)}")

    def _require_our_layers(self) -> None:
        known = {stacked(self.config, one.name).key for one in (*parameters(self.config), *states(self.config))}
        saved = (name for name in self.tensors if name.startswith("decoder.layers."))
        own = sorted(name for name in saved if name not in known and not name.endswith("_extra_state"))
        if own:
            raise ConfigurationError(
                f"{self.path} has {', '.join(own)}, of layers of one's own: no Hugging Face family computes with them; "
                "such a model is evaluated and continued by the script that trains it, and cannot be exported"
            )

    def dtype(self, name: str = "embedding.word_embeddings.weight") -> str:
        """Return the dtype of a parameter's weights, as in safetensors."""
        return self.tensors[self._key(name)].dtype

    def pieces(self, name: str) -> Iterator[Piece]:
        """Return the saved pieces of a parameter.

        Raises:
            DataError: one of them cannot be read.
        """
        key, indices = self._key(name), stacked(self.config, name).indices
        for chunk in self.tensors[key].chunks:
            inside = [index - start for index, start in zip(indices, chunk.offsets, strict=False)]
            if all(0 <= index < size for index, size in zip(inside, chunk.sizes, strict=False)):
                yield self._piece(key, chunk, tuple(inside))

    def damage(self) -> tuple[checkpoint_manifest.Files, list[str]]:
        """Return the manifest's entries of the shards, and what else is not as it says; no entries, where there is no
        manifest."""
        try:
            files = checkpoint_manifest.read(self.path) or {}
        except ValueError as error:
            return {}, [str(error)]
        shards = {name: entry for name, entry in files.items() if name.endswith(".distcp")}
        return shards, checkpoint_manifest.problems(
            self.path, {name: files[name] for name in files.keys() - shards.keys()}
        )

    def _piece(self, key: str, chunk: Chunk, inside: tuple[int, ...]) -> Piece:
        row, *column = chunk.offsets[len(inside) :]
        shape = chunk.sizes[len(inside) :]
        at, array = self._elements(file_inside(self.path, chunk.file), key, chunk, self.tensors[key].dtype)
        if array is not None:
            return Piece(row, column[0] if column else 0, shape, chunk.file, 0, array[inside])
        for axis, index in enumerate(inside):
            at += index * math.prod(chunk.sizes[axis + 1 :]) * WIDTH[self.tensors[key].dtype]
        return Piece(row, column[0] if column else 0, shape, chunk.file, at)


def _elements(path: Path, key: str, chunk: Chunk, dtype: str) -> "tuple[int, npt.NDArray | None]":
    """Return where a chunk's elements begin in the file; or where they are not in order, the elements."""
    try:
        with path.open("rb", buffering=0) as file:
            offset = place_of_elements(file, chunk.offset, chunk.length, chunk.sizes, dtype)
            return (0, _read(file, chunk, dtype)) if offset is None else (offset, None)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{path}: {key} cannot be read: {error}. Take an earlier checkpoint.") from error


def _read(file: BinaryIO, chunk: Chunk, dtype: str) -> "npt.NDArray":
    """Read through torch, which takes seconds to import, a shard that holds its elements in another order."""
    import torch

    check_archive(file, chunk.offset, chunk.length)
    file.seek(chunk.offset)
    tensor = torch.load(io.BytesIO(file.read(chunk.length)), map_location="cpu", weights_only=True)
    if tuple(tensor.shape) != chunk.sizes or tensor.dtype != getattr(torch, DTYPES[dtype]):
        raise RuntimeError(f"{tensor.dtype} {list(tensor.shape)} instead of {DTYPES[dtype]} {list(chunk.sizes)}")
    bits = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return bits.view(ARRAYS[dtype]).reshape(chunk.sizes)
