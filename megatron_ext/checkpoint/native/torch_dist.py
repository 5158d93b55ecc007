"""Reads and writes the `.metadata` of a torch_dist checkpoint without torch.

It is a pickle of torch's own classes, which say where every tensor lies. Here it is read as data (by
`untrusted/inert_pickle.py`), of which every number and name is checked, and written from such. `safe_reading.py` makes
torch's own objects from it.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeGuard

from megatron_ext.checkpoint.dtypes import DTYPES, WIDTHS, code_of
from megatron_ext.checkpoint.native.torch_archive import plain
from megatron_ext.untrusted.inert_pickle import Global, Made, plain_text
from megatron_ext.untrusted.inert_pickle import read as read_inert

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILES = "torch.distributed.checkpoint.filesystem"
_ENGINE = "megatron.core.dist_checkpointing.strategies.torch"
_LARGEST = 1 << 29  # bytes of .metadata; a model of 200,000 tensors has some 75 million
_LARGEST_NUMBER = 1 << 62
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Chunk:
    """A saved part of a tensor."""

    offsets: tuple[int, ...]
    """Index of its first element, by dimension."""
    sizes: tuple[int, ...]
    file: str
    """Name of the file, which lies next to the metadata."""
    offset: int
    """Offset in the file of the archive that `torch.save` wrote."""
    length: int


@dataclass(frozen=True)
class Properties:
    """Properties of a tensor that torch notes besides its dtype."""

    requires_grad: bool = False
    memory_format: int = 0
    """torch's number: 0 contiguous, 1 channels last, 2 preserved."""
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Tensor:
    """A saved tensor."""

    dtype: str
    """Name of the dtype as in safetensors where it is one of those, else torch's own name."""
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    properties: Properties = field(default=Properties(), compare=False)


@dataclass(frozen=True)
class Saved:
    """Parsed metadata of a checkpoint."""

    tensors: dict[str, Tensor]
    objects: dict[str, Chunk]
    """Places of the entries that are no tensors; without offsets and sizes."""


_kept: list[tuple[bytes, Saved]] | None = None
"""The metadata file that was read last, with its parsed contents; None where nothing is kept."""


@contextmanager
def kept_while_loading() -> Iterator[None]:
    """Keep the metadata that is read inside: megatron-core asks for it three times, and parsing takes most of the
    time."""
    global _kept
    before, _kept = _kept, []
    try:
        yield
    finally:
        _kept = before


def read(file: IO[bytes]) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint. Raises as `read_all` does."""
    return read_all(file).tensors


def read_objects(file: IO[bytes]) -> dict[str, Chunk]:
    """Return the places of a checkpoint's objects that are no tensors. Raises as `read_all` does."""
    return read_all(file).objects


def read_all(file: IO[bytes]) -> Saved:
    """Return all that a checkpoint's metadata says.

    Raises:
        pickle.UnpicklingError: the metadata is damaged, asks for a class that no checkpoint needs, names a file outside
            of its own folder, or contradicts itself.
    """
    content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise pickle.UnpicklingError(f".metadata is larger than {_LARGEST:,} bytes")
    for known, saved in _kept or ():
        if known == content:
            return saved
    try:
        saved = _saved(read_inert(content, ALLOWED))
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(f".metadata {error}") from None
    if _kept is not None:
        _kept[:] = [(content, saved)]
    return saved


def check_name(name: Any) -> None:
    """Raise pickle.UnpicklingError where the file of a chunk is not one next to the metadata."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise pickle.UnpicklingError(f"names the file {plain_text(name)}, which is not one beside it")


def write(tensors: Mapping[str, Tensor], objects: Mapping[str, Chunk]) -> bytes:
    """Return the metadata of these; an object has neither offsets nor sizes."""
    saved = [(name, _object("TensorStorageMetadata", _tensor(tensor))) for name, tensor in tensors.items()]
    saved += [(name, _object("BytesStorageMetadata", {})) for name in objects]
    places = [(_index(name, None, None), _place(chunk)) for name, chunk in objects.items()]
    for name, tensor in tensors.items():
        places += [(_index(name, chunk.offsets, number), _place(chunk)) for number, chunk in enumerate(tensor.chunks)]
    content = {
        "state_dict_metadata": _dictionary((plain(name), entry) for name, entry in saved),
        "storage_data": _dictionary(places),
        "planner_data": plain(None),
        "storage_meta": plain(None),
    }
    return b"\x80\2" + _object("Metadata", content) + b"."


def _tensor(tensor: Tensor) -> dict[str, bytes]:
    properties = (
        b"("
        + _global("torch", DTYPES[tensor.dtype])
        + _global("torch.serialization", "_get_layout")
        + plain("torch.strided")
        + b"\x85R\x89"  # its layout; no gradient
        + _global(_METADATA, "_MEM_FORMAT_ENCODING")
        + plain(0)
        + b"\x85R\x89t"  # in order; not pinned
    )
    chunks = (
        _object("ChunkStorageMetadata", {"offsets": _size(chunk.offsets), "sizes": _size(chunk.sizes)})
        for chunk in tensor.chunks
    )
    return {
        "properties": _global(_METADATA, "TensorProperties") + b")\x81" + properties + b"b",
        "size": _size(tensor.size),
        "chunks": b"](" + b"".join(chunks) + b"e",
    }


def _index(name: str, offsets: tuple[int, ...] | None, number: int | None) -> bytes:
    state = {"fqn": plain(name), "index": plain(number)}
    return _object("MetadataIndex", state if offsets is None else state | {"offset": _size(offsets)})


def _place(chunk: Chunk) -> bytes:
    state = {"relative_path": plain(chunk.file), "offset": plain(chunk.offset), "length": plain(chunk.length)}
    return _global(_FILES, "_StorageInfo") + b")\x81" + _dictionary(_named(state)) + b"b"


def _object(name: str, state: Mapping[str, bytes]) -> bytes:
    """Return the opcodes of an object of torch's metadata whose attributes these are."""
    return _global(_METADATA, name) + b")\x81" + _dictionary(_named(state)) + b"b"


def _named(state: Mapping[str, bytes]) -> Iterable[tuple[bytes, bytes]]:
    return ((plain(name), value) for name, value in state.items())


def _dictionary(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _size(numbers: tuple[int, ...]) -> bytes:
    return _global("torch", "Size") + b"(" + b"".join(map(plain, numbers)) + b"t\x85R"


def _saved(content: Any) -> Saved:
    state = _state(content, _METADATA, "Metadata")
    entries, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if type(entries) is not dict or type(stored) is not dict:
        raise _wrong("has no tables of tensors and places")
    places = dict(_keyed_place(key, file_range) for key, file_range in stored.items())
    if len(places) != len(stored):
        raise _wrong("gives a tensor two places")
    tensors: dict[str, Tensor] = {}
    left = len(places)  # every chunk has a place of its own: what is named again and again is not followed
    for name, entry in entries.items():
        if type(name) is not str:
            raise _wrong(f"has {plain_text(name)} for a tensor's name")
        if _is(entry, _METADATA, "TensorStorageMetadata"):
            tensors[name] = _read_tensor(name, entry, places, left)
            left -= len(tensors[name].chunks)
        elif not _is(entry, _METADATA, "BytesStorageMetadata"):
            raise _wrong(f"has {plain_text(entry)} where it should describe {plain_text(name)}")
    if any(name in tensors for name, offsets in places if offsets is None):
        raise _wrong("has a tensor that is an object, too")
    objects = {name: Chunk((), (), *file_range) for (name, offsets), file_range in places.items() if offsets is None}
    return Saved(tensors, objects)


_Place = tuple[str, int, int]  # file, offset, length


def _keyed_place(key: Any, info: Any) -> tuple[tuple[str, tuple[int, ...] | None], _Place]:
    index, state = _state(key, _METADATA, "MetadataIndex"), _state(info, _FILES, "_StorageInfo")
    name, offsets = index.get("fqn"), index.get("offset")
    if type(name) is not str:
        raise _wrong(f"has {plain_text(name)} for a tensor's name")
    if state.get("transform_descriptors") is not None:
        raise _wrong(f"says that {plain_text(name)} is compressed, which is not read")
    check_name(state.get("relative_path"))
    offset, length = _numbers((state.get("offset"), state.get("length")))
    return (name, None if offsets is None else _read_size(offsets)), (state["relative_path"], offset, length)


def _read_tensor(name: str, entry: Made, places: Mapping[Any, _Place], most: int) -> Tensor:
    state = _state(entry, _METADATA, "TensorStorageMetadata")
    size, chunks = _read_size(state.get("size")), state.get("chunks")
    dtype, properties = _read_properties(state.get("properties"))
    if type(chunks) is not list or len(chunks) > most:
        raise _wrong(f"places {plain_text(name)} more often than it has places")
    stored = tuple(_read_chunk(name, chunk, size, places) for chunk in chunks)
    return Tensor(code_of(dtype), size, stored, properties)


def _read_chunk(name: str, chunk: Any, size: tuple[int, ...], places: Mapping[Any, _Place]) -> Chunk:
    state = _state(chunk, _METADATA, "ChunkStorageMetadata")
    offsets, sizes = _read_size(state.get("offsets")), _read_size(state.get("sizes"))
    inside = len(offsets) == len(sizes) == len(size)
    if not inside or any(start + length > whole for start, length, whole in zip(offsets, sizes, size, strict=True)):
        raise _wrong(f"has a part of {plain_text(name)} at {list(offsets)} that is not in {list(size)}")
    if (name, offsets) not in places:
        raise _wrong(f"has no place for {plain_text(name)} at {list(offsets)}")
    return Chunk(offsets, sizes, *places[name, offsets])


def _read_properties(made: Any) -> tuple[str, Properties]:
    """Read dtype, layout, requires_grad, memory format, pin_memory, and in newer versions of torch the strides."""
    state = made.state if _is(made, _METADATA, "TensorProperties") else None
    if type(state) is not tuple or len(state) not in (5, 6):
        raise _wrong("has a tensor without its properties")
    dtype, layout, grad, form, pinned, strides = (*state, None)[:6]
    if type(dtype) is not Global or dtype.module != "torch" or dtype.name not in WIDTHS:
        raise _wrong(f"has {plain_text(dtype)} for a dtype")
    if not _is(layout, "torch.serialization", "_get_layout") or layout.args != ("torch.strided",):
        raise _wrong("has a tensor that is not strided")
    if not _is(form, _METADATA, "_MEM_FORMAT_ENCODING") or form.args not in ((0,), (1,), (2,)):
        raise _wrong("has an unknown memory format")
    if type(grad) is not bool or type(pinned) is not bool:
        raise _wrong("has tensor properties that are neither true nor false")
    return dtype.name, Properties(grad, form.args[0], pinned, None if strides is None else _numbers(strides))


def _is(made: Any, module: str, name: str) -> TypeGuard[Made]:
    return type(made) is Made and made.kind == Global(module, name)


def _state(made: Any, module: str, name: str) -> dict[str, Any]:
    """Return the attributes of an object that must be of this class."""
    if not _is(made, module, name) or type(made.state) is not dict:
        what = made.kind.name if type(made) is Made else plain_text(made)
        raise _wrong(f"holds {what} where a {name} belongs")
    return made.state


def _read_size(made: Any) -> tuple[int, ...]:
    numbers = made.args[0] if _is(made, "torch", "Size") and len(made.args) == 1 else None
    return _numbers(numbers)


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > _MOST_DIMENSIONS:
        raise _wrong(f"has {plain_text(values)} for sizes")
    for value in values:
        if type(value) is not int or not 0 <= value < _LARGEST_NUMBER:
            raise _wrong(f"has {plain_text(value)} for a size or a place")
    return values


def _wrong(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(what)


ALLOWED: frozenset[tuple[str, str]] = frozenset(
    [
        (module, name)
        for module, names in {
            _METADATA: (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
                *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
            ),
            _PLANNER: ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
            _FILES: ("_StorageInfo",),
            _ENGINE: ("MCoreMetadata", "MCoreSavePlan"),
            "collections": ("OrderedDict",),
            "torch": ("Size", *WIDTHS),
            "torch.serialization": ("_get_layout",),
            "pathlib": ("PosixPath",),
            "pathlib._local": ("PosixPath",),  # of Python 3.13
        }.items()
        for name in names
    ]
)
"""Names of the modules by which torch and megatron-core write the metadata of a checkpoint."""
