"""megatron-core's datasets and their builder, with index files that any process may write and none reads half-written.

megatron-core lets global rank 0 alone write, under the final names, and trusts whatever lies there. Here a file gets
its name when it is whole, and the process that needs one that is missing makes it: on every node, if the folder is its
own.
"""

import copy
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_ext.config.parse.blend import is_url
from megatron_ext.data.integrity import open_index
from megatron_ext.data.stored import cache_root, open_bin
from megatron_ext.durable import replacing
from megatron_ext.untrusted.text import read_file

_LARGEST = 1 << 24
"""Most bytes of a description."""


class CachedGPTDataset(GPTDataset):
    """A GPTDataset that finds its three index files in the cache, or makes them, and reads tokens from a store too."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        """Return the sequences of a pair: megatron-core's reader, or ours where they lie behind a URL."""
        if is_url(dataset_path):
            return StoredSequences(dataset_path)
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        files: Any = self.dataset
        folder = cache_folder(self.config.path_to_cache, files.path_prefix)
        build = super()._build_document_sample_shuffle_indices
        document, sample, shuffle = load_or_build(
            folder,
            f"{self.unique_description_hash}-GPTDataset-{self.index_split.name}",
            ("document_index", "sample_index", "shuffle_index"),
            self.unique_description,
            lambda: _in_memory(self, build),
        )
        return document, sample, shuffle


class StoredSequences:
    """What GPTDataset asks of an IndexedDataset, of a pair behind a URL."""

    def __init__(self, prefix: str):
        self.path_prefix = prefix
        index = open_index(prefix)
        self.sequence_lengths, self._pointers = index.lengths, index.pointers
        self._dtype = index.dtype.newbyteorder("<")
        self._file = open_bin(prefix)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of sequence `idx` from `offset` on, by default all that follow."""
        count = int(self.sequence_lengths[idx]) - offset if length is None else int(length)
        start = int(self._pointers[idx]) + offset * self._dtype.itemsize
        return np.frombuffer(self._file.read(start, count * self._dtype.itemsize), self._dtype)


class CachedBlendedDataset(BlendedDataset):
    """A BlendedDataset that finds its two index files in the cache, or makes them."""

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        first: Any = self.datasets[0]
        build = super()._build_indices
        dataset_index, sample_index = load_or_build(
            cache_folder(self.config.path_to_cache, first.dataset.path_prefix),
            f"{self.unique_description_hash}-BlendedDataset-{self.split.name}",
            ("dataset_index", "dataset_sample_index"),
            self.unique_description,
            lambda: _in_memory(self, build),
        )
        return dataset_index, sample_index


class LocalBuilder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder without its barriers: the caller decides who builds first, for all datasets at once."""

    def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:
        per_prefix = [
            self._build_megatron_dataset_splits(prefix, split, sizes, False)
            for prefix, sizes in zip(prefixes, sizes_per_dataset, strict=True)
        ]
        return [list(datasets) for datasets in zip(*per_prefix, strict=True)]

    @staticmethod
    def build_generic_dataset(  # pyright: ignore[reportIncompatibleMethodOverride]
        kind: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Build one dataset on this rank, without waiting for others."""
        return (CachedBlendedDataset if kind is BlendedDataset else kind)(*args)


def cache_folder(path_to_cache: str | None, prefix: str) -> Path:
    """Return --data-cache-path, or megatron-core's default folder next to the data; for data behind a URL one of this
    machine."""
    if not path_to_cache and is_url(prefix):
        return cache_root() / "GPTDataset_indices"
    return Path(path_to_cache) if path_to_cache else Path(prefix) / "cache" / "GPTDataset_indices"


def load_or_build(
    folder: Path, stem: str, names: tuple[str, ...], description: str, build: Callable[[], tuple[np.ndarray, ...]]
) -> list[np.ndarray]:
    """Return the arrays `<folder>/<stem>-<name>.npy`, mapped. If one is missing or cannot be read, all are built and
    written.

    Args:
        folder: the cache; made if it is missing.
        stem: name of the content: another input has another stem.
        names: names of the arrays.
        description: what the stem is a hash of; written last, to `<stem>-description.txt`.
        build: makes the arrays.

    Raises:
        OSError: the folder cannot be written.
    """
    paths = [folder / f"{stem}-{name}.npy" for name in names]
    description_path = folder / f"{stem}-description.txt"
    try:
        if read_file(description_path, _LARGEST) == description.encode():
            return _mapped(paths)
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError):
        pass  # not there, or not whole: a machine that went down may leave a file without its content
    folder.mkdir(parents=True, exist_ok=True)
    for path, array in zip(paths, build(), strict=True):
        _write(path, lambda file, array=array: np.save(file, array, allow_pickle=False))
    _write(description_path, lambda file: file.write(description.encode()))
    return _mapped(paths)


def _mapped(paths: Sequence[Path]) -> list[np.ndarray]:
    """Return the arrays of some files, as plain arrays: each index into a np.memmap is a call of Python."""
    return [np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)) for path in paths]


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file that has its name only when it is whole; another process may write the same."""
    with replacing(path, path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")) as file:
        write(file)


def _in_memory(dataset: Any, build: Callable[[], Any]) -> Any:
    """Run megatron-core's own build, on any rank, without a file: what it does for a mock dataset, which has no
    folder."""
    config = dataset.config
    dataset.config = copy.copy(config)
    dataset.config.path_to_cache, dataset.config.mock = None, True
    try:
        return build()
    finally:
        dataset.config = config
