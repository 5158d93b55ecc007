"""The `.metadata` of a torch_dist checkpoint, read and written without torch.

It is a pickle of torch's own classes, which say where every tensor lies. Here they are read as plain tuples, through
the same allow-list as everywhere (`safe_reading.py`; a test compares the two), and written from such.
"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_ext.checkpoint.torch_archive import plain

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of weights, by their name in safetensors. Files may hold tensors of other dtypes, which nobody here reads."""

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILES = "torch.distributed.checkpoint.filesystem"
_ENGINE = "megatron.core.dist_checkpointing.strategies.torch"


@dataclass(frozen=True)
class Chunk:
    """A saved part of a tensor."""

    offsets: tuple[int, ...]
    """Of its first element, by dimension."""
    sizes: tuple[int, ...]
    file: str
    """Beside the metadata."""
    offset: int
    """Of what `torch.save` wrote, in the file."""
    length: int


@dataclass(frozen=True)
class Tensor:
    """A saved tensor."""

    dtype: str
    """As in safetensors where it is one of those, else torch's own name."""
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read(file: IO[bytes]) -> dict[str, Tensor]:
    """All tensors of a checkpoint.

    Raises:
        pickle.UnpicklingError: the metadata is damaged, asks for a class that no checkpoint needs, or names a file
            outside of its own folder.
    """
    try:
        content = _Unpickler(file).load()
        for place in content.storage_data.values():
            check_name(place.relative_path)
        places = {(key.fqn, key.offset): place for key, place in content.storage_data.items()}
        found = {}
        for name, entry in content.state_dict_metadata.items():
            if type(entry) is ALLOWED[_METADATA, "TensorStorageMetadata"]:
                chunks = tuple(_chunk(places[name, chunk.offsets], chunk) for chunk in entry.chunks)
                found[name] = Tensor(_code(entry.properties.dtype), _numbers(entry.size), chunks)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise pickle.UnpicklingError(f".metadata is damaged: {type(error).__name__}: {error}") from error
    return found


def read_objects(file: IO[bytes]) -> dict[str, Chunk]:
    """Where the objects of a checkpoint lie that are no tensors. Raises as `read` does."""
    try:
        content = _Unpickler(file).load()
        found = {}
        for key, place in content.storage_data.items():
            if key.offset is None:
                check_name(place.relative_path)
                offset, length = _numbers((place.offset, place.length))
                found[key.fqn] = Chunk((), (), place.relative_path, offset, length)
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        raise pickle.UnpicklingError(f".metadata is damaged: {type(error).__name__}: {error}") from error
    return found


def check_name(name: Any) -> None:
    """Raises pickle.UnpicklingError where the file of a chunk is not one beside the metadata."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise pickle.UnpicklingError(f".metadata names the file {name!r}, which is not one beside it")


def write(tensors: Mapping[str, Tensor], objects: Mapping[str, Chunk]) -> bytes:
    """The metadata of these; an object has neither offsets nor sizes."""
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
    """The opcodes of an object of torch's metadata whose attributes these are."""
    return _global(_METADATA, name) + b")\x81" + _dictionary(_named(state)) + b"b"


def _named(state: Mapping[str, bytes]) -> Iterable[tuple[bytes, bytes]]:
    return ((plain(name), value) for name, value in state.items())


def _dictionary(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _size(numbers: tuple[int, ...]) -> bytes:
    return _global("torch", "Size") + b"(" + b"".join(map(plain, numbers)) + b"t\x85R"


def _chunk(place: Any, chunk: Any) -> Chunk:
    offset, length = _numbers((place.offset, place.length))
    return Chunk(_numbers(chunk.offsets), _numbers(chunk.sizes), place.relative_path, offset, length)


def _numbers(values: tuple[int, ...]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise pickle.UnpicklingError(f".metadata has {values!r} for a size or a place")
    return tuple(values)


def _code(dtype: str) -> str:
    return next((code for code, name in DTYPES.items() if name == dtype), dtype)


class _Record:
    """Holds what it is given, as those classes do."""

    offset = None  # a MetadataIndex of an object has none

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:  # of TensorProperties
            self.dtype = state[0]


def _stand_in(name: str) -> type[_Record]:
    return type(name, (_Record,), {})


# The same names as in `safe_reading`; each only holds what it is given.
ALLOWED: dict[tuple[str, str], Any] = {
    (module, name): _stand_in(name)
    for module, names in {
        _METADATA: (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        ),
        _PLANNER: ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
        _FILES: ("_StorageInfo",),
        _ENGINE: ("MCoreMetadata", "MCoreSavePlan"),
    }.items()
    for name in names
} | {
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
}
_DTYPE_NAMES = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", *DTYPES.values()),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and global_name in _DTYPE_NAMES:
            return global_name
        try:
            return ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module_name}.{global_name}, which no checkpoint needs: nothing of it was run"
            ) from None
