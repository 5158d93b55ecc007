"""Read what others have pickled without letting it run anything.

The format keeps two kinds of pickle: `.metadata`, which says where every tensor lies, and small objects (the state of
the random generators) inside the shards. torch reads both with an unpickler that builds whatever they ask for. Inside
`no_code_from_files()` the first is read through a list of the classes that it is made of, and the second as
`torch.load(weights_only=True)` reads it.
"""

import collections
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import IO, Any

import torch
import torch.serialization
from megatron.core.dist_checkpointing.strategies import torch as engine_torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ext.checkpoint.torch_dist import check_name

# By these, torch writes the metadata of a checkpoint; each only holds what it is given. `torch_dist` has them, too.
ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        planner.WriteItemType,
        filesystem._StorageInfo,
        engine_torch.MCoreMetadata,
        engine_torch.MCoreSavePlan,
        collections.OrderedDict,
    )
} | {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # a look-up by name
    ("pathlib", "PosixPath"): PosixPath,
}

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's own switch; it also overrides an explicit weights_only=False


class SafeReader(FileSystemReader):
    """torch's reader of a checkpoint folder, for a folder that anybody may have written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """What the checkpoint holds and where.

        Raises:
            pickle.UnpicklingError: the file is damaged, or asks for something else than metadata.
            OSError: it cannot be read.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with path.open("rb") as file:
            content = read_metadata(file)
        meta = getattr(content, "storage_meta", None) or metadata.StorageMeta()
        meta.load_id = self.load_id
        content.storage_meta = meta
        return content


def read_metadata(file: IO[bytes]) -> metadata.Metadata:
    """Unpickle metadata, from the listed classes alone.

    Raises:
        pickle.UnpicklingError: it is damaged, asks for another class, or names a file outside of its own folder.
    """
    try:
        content = _Unpickler(file).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise pickle.UnpicklingError(f".metadata is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(content, metadata.Metadata):
        raise pickle.UnpicklingError(f".metadata holds a {type(content).__name__} instead of metadata")
    for place in (content.storage_data or {}).values():
        check_name(place.relative_path)
    return content


@contextmanager
def no_code_from_files() -> Iterator[None]:
    """megatron-core's loading functions read no free pickle inside."""
    reader = engine_torch.FileSystemReader
    before = os.environ.get(_WEIGHTS_ONLY)
    engine_torch.FileSystemReader = SafeReader
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        engine_torch.FileSystemReader = reader
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(found := getattr(torch, global_name, None), torch.dtype):
            return found
        try:
            return ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module_name}.{global_name}, which no checkpoint needs: nothing of it was run"
            ) from None
