"""Reads pickles that others have written without letting them run anything, or change anything.

The format keeps two kinds of pickle: `.metadata`, which says where every tensor lies, and small objects (the state of
the random generators) inside the shards. torch reads both with an unpickler that builds whatever they ask for. Inside
`no_code_from_files()` torch's objects are made here from the first, read as plain data (`torch_dist.py`), and the
second is read as `torch.load(weights_only=True)` reads it, except the classes added by megatron-core that do more than
hold the values they are given. No archive is read of which a record is compressed: it could fill the memory.
"""

import math
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
import torch.serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import torch as engine_torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_ext.checkpoint.dtypes import DTYPES, WIDTH
from megatron_ext.checkpoint.native import torch_dist
from megatron_ext.checkpoint.native.torch_archive import check_archive, place_of_elements
from megatron_ext.untrusted.untrusted_folder import check_folder, file_inside

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's own switch; it also overrides an explicit weights_only=False
_LARGEST_OBJECT = 1 << 28  # bytes; a random generator's state has some 5,000, Megatron-LM's arguments 30,000
_CODES = {getattr(torch, name): code for code, name in DTYPES.items()}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
# Of the classes that megatron-core lets torch make, the ones in these modules only hold values: flags, enums.
# Others do not, such as numpy's arrays, whose state is taken from the file as it stands, addresses of memory included.
_HARMLESS = ("argparse", "types", "signal", "pathlib", "megatron.core.")


UNREADABLE = (
    CheckpointException,
    CheckpointingException,
    pickle.UnpicklingError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
)
"""Errors that megatron-core and torch raise for a file that is cut short, altered or missing, or holds something else
than is wanted."""


class SafeReader(FileSystemReader):
    """Torch's reader of a checkpoint folder, made safe for a folder that anybody may have written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the metadata of the checkpoint: its entries, and the file and place of each.

        Raises:
            pickle.UnpicklingError: the file is damaged, or asks for something else than metadata.
            DataError: the metadata, or a file that it names, is missing, is no file, or a link out of the folder.
            OSError: the file cannot be read.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with file_inside(path.parent, path.name).open("rb") as file:
            content = read_metadata(file)
        for name in {storage.relative_path for storage in content.storage_data.values()}:
            file_inside(path.parent, name)
        content.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return content

    def set_up_storage_reader(self, metadata: metadata.Metadata, *args: Any, **kwargs: Any) -> None:
        """Remember where everything lies, and of which shape and dtype it is."""
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._chunks = {
            (name, chunk.offsets): (chunk.sizes, tensor.properties.dtype)
            for name, tensor in metadata.state_dict_metadata.items()
            if not isinstance(tensor, BytesStorageMetadata)
            for chunk in tensor.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries that `plan` asks for: of tensors, no more than the part of the file that has the requested
        elements.

        Raises:
            pickle.UnpicklingError: an object, or a tensor that torch is to unpickle, is not as `torch.save` writes it.
        """
        left = []
        for name, items in groupby(sorted(plan.items, key=self._file_of), self._file_of):
            with Path(self.path, name).open("rb") as file:
                left += [item for item in items if not self._read(file, item, planner)]
        return super().read_data(replace(plan, items=left), planner)

    def _file_of(self, item: ReadItem) -> str:
        return self.storage_data[item.storage_index].relative_path

    def _read(self, file: BinaryIO, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read a part of a tensor; return False where torch has to unpickle it, or an object, which it then may."""
        index = item.storage_index
        stored = self.storage_data[index]
        if item.type is LoadItemType.BYTE_IO or index.offset is None:
            _check(file, stored.offset, stored.length, index.fqn, _LARGEST_OBJECT)
            return False
        shape, dtype = self._chunks[index.fqn, index.offset]
        offset = _place_of_tensor(file, stored.offset, stored.length, shape, dtype)
        part = None if offset is None else read_part(file, offset, shape, dtype, item.storage_offsets, item.lengths)
        if part is None:
            _check(file, stored.offset, stored.length, index.fqn)
            return False
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)
        return True


def _check(file: BinaryIO, offset: int, length: int, name: str, most: int | None = None) -> None:
    """Check that torch may unpickle the archive at `offset` of the file. Raises pickle.UnpicklingError."""
    try:
        check_archive(file, offset, length, most)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(f"{ascii(name)[:200]} in {file.name}: {error}") from None


def read_metadata(file: IO[bytes]) -> metadata.Metadata:
    """Return torch's metadata, made from the file's contents.

    Raises:
        pickle.UnpicklingError: the file is damaged, asks for another class, or names a file outside of its own folder.
    """
    saved = torch_dist.read_all(file)
    entries: dict[str, Any] = {name: _entry(tensor) for name, tensor in saved.tensors.items()}
    places = {
        metadata.MetadataIndex(name, chunk.offsets, number): _place(chunk)
        for name, tensor in saved.tensors.items()
        for number, chunk in enumerate(tensor.chunks)
    }
    entries |= dict.fromkeys(saved.objects, metadata.BytesStorageMetadata())
    places |= {metadata.MetadataIndex(name): _place(chunk) for name, chunk in saved.objects.items()}
    return metadata.Metadata(entries, storage_data=places)


def _entry(tensor: torch_dist.Tensor) -> metadata.TensorStorageMetadata:
    stored = tensor.properties
    properties = metadata.TensorProperties(
        dtype=getattr(torch, DTYPES.get(tensor.dtype, tensor.dtype)),
        requires_grad=stored.requires_grad,
        memory_format=_FORMATS[stored.memory_format],
        pin_memory=stored.pin_memory,
    )
    if hasattr(properties, "strides"):  # older versions of torch do not note them
        properties.strides = stored.strides
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks
    ]
    return metadata.TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)


def _place(chunk: torch_dist.Chunk) -> _StorageInfo:
    return _StorageInfo(chunk.file, chunk.offset, chunk.length)


@contextmanager
def no_code_from_files(checkpoint: Path) -> Iterator[None]:
    """Keep megatron-core's loading functions inside from reading a free pickle, or a file that lies outside of the
    checkpoint.

    Raises:
        DataError: the folder holds something else than files and folders.
        pickle.UnpicklingError: the common state of an older checkpoint is not as `torch.save` writes it.
    """
    check_folder(checkpoint)
    if (common := checkpoint / COMMON_STATE_FNAME).is_file():
        with common.open("rb") as file:
            _check(file, 0, common.stat().st_size, common.name, _LARGEST_OBJECT)
    reader, added = engine_torch.FileSystemReader, torch.serialization.get_safe_globals()
    before = os.environ.get(_WEIGHTS_ONLY)
    engine_torch.FileSystemReader = SafeReader
    os.environ[_WEIGHTS_ONLY] = "1"
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([_inert(kind) for kind in added if _module(kind).startswith(_HARMLESS)])
    try:
        with torch_dist.kept_while_loading():
            yield
    finally:
        engine_torch.FileSystemReader = reader
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(added)
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


def _module(kind: Any) -> str:
    """Return the module of a class or function that torch may make, or of the pair of such and its name."""
    return getattr(kind[0] if isinstance(kind, tuple) else kind, "__module__", "") or ""


def _inert(kind: Any) -> Any:
    """Keep torch from setting an attribute of an object that the whole process shares, although it may make its
    class."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return partial(kind), f"{kind.__module__}.{kind.__qualname__}"
    return kind


def _place_of_tensor(file: BinaryIO, offset: int, length: int, shape: Sequence[int], dtype: torch.dtype) -> int | None:
    """Return the position in the file at which the elements of a tensor begin that torch wrote at `offset`; None where
    torch must read the tensor itself.

    Raises:
        OSError: the file cannot be read.
    """
    code = _CODES.get(dtype)
    return None if code is None else place_of_elements(file, offset, length, tuple(shape), code)


def read_part(
    file: BinaryIO, offset: int, shape: Sequence[int], dtype: torch.dtype, begin: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor | None:
    """Return the elements from `begin` on, `lengths` of them along each axis, of the tensor at `offset`.

    No more of the file is read than the range from the first of them to the last. torch's reader unpickles the whole
    tensor each time, of which a rank may want a few rows: of a shard of a distributed optimizer's state, one part in as
    many as there are ranks.

    Returns:
        None where the file ends before them.
    Raises:
        OSError: the file cannot be read.
    """
    if 0 in lengths:
        return torch.empty(tuple(lengths), dtype=dtype)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(index * stride for index, stride in zip(begin, strides, strict=True))
    count = 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    width = WIDTH[_CODES[dtype]]
    buffer = bytearray(count * width)
    file.seek(offset + first * width)
    if file.readinto(buffer) != len(buffer):  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return torch.frombuffer(buffer, dtype=dtype).as_strided(tuple(lengths), strides)
