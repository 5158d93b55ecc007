"""--data-order shuffled is megatron-core's order, so that a run can be moved over.

Documents are shuffled for all epochs together, laid end to end, cut into samples of seq_length + 1 tokens, and the
samples are shuffled. megatron-core writes that down in index files, which are kept in a cache.

megatron-core's datasets and their builder, with index files that any process may write and none reads half-written.

megatron-core lets global rank 0 alone write, under the final names, and trusts whatever files it finds. Here a
file gets its name when it is whole, and a process that needs a missing file makes it: on every node, if each node has a
folder of its own.
"""

import copy
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_ext.config.parse.blend import Blend, is_url
from megatron_ext.config.schema import Config
from megatron_ext.data.integrity import Share, open_index
from megatron_ext.data.mask import BEGINS, COUNTS, Mask, MaskOfSequences
from megatron_ext.data.one_rank_per_node import one_rank_of_a_node_first
from megatron_ext.data.samples import SampleDataset, SampleWindow, Source
from megatron_ext.data.splits import SPLITS, SplitFiles
from megatron_ext.data.stored import cache_root, open_bin
from megatron_ext.durable import replacing
from megatron_ext.errors import StorageError
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
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

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return the sample that megatron-core does, without its looks for padding, which no sample here has: they
        take as long as all the rest."""
        config: Any = self.config
        if idx is None or config.eod_mask_loss:
            return super().__getitem__(idx)
        text = torch.from_numpy(self._query_document_sample_shuffle_indices(idx)[0])
        return {"tokens": text[:-1], "labels": text[1:], **_fields_of_all(len(text) - 1)}

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


@functools.cache
def _fields_of_all(length: int) -> dict[str, torch.Tensor]:
    return {"loss_mask": torch.ones(length), "position_ids": torch.arange(length)}


class StoredSequences:
    """Implements, for a pair behind a URL, the methods of IndexedDataset that GPTDataset calls."""

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
        description: the text whose hash the stem is; written last, to `<stem>-description.txt`.
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
        pass  # missing, or not whole: a machine that went down may leave a file without its content
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
    """Run megatron-core's own build, on any rank, without a file, as megatron-core does for a mock dataset, which has
    no folder."""
    config = dataset.config
    dataset.config = copy.copy(config)
    dataset.config.path_to_cache, dataset.config.mock = None, True
    try:
        return build()
    finally:
        dataset.config = config


class ShuffledDataset:
    """megatron-core's dataset of one split, with the source of each sample."""

    def __init__(
        self,
        dataset: GPTDataset | BlendedDataset,
        sources: list[Source],
        num_samples: int | None,
        masks: list[MaskOfSequences] | None = None,
    ):
        self._dataset: Any = dataset
        self._masks = masks
        self.sources = sources
        self._num_samples = num_samples
        self._counted = 0, np.zeros(len(sources), np.int64)

    @property
    def _parts(self) -> list[Any]:
        return self._dataset.datasets if isinstance(self._dataset, BlendedDataset) else [self._dataset]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if self._masks is None:
            return self._dataset[index]
        source, index = self._source(index)
        return self.part(source)[index]

    @property
    def order_depends_on(self) -> list[int]:
        """Number of epochs and of samples where there are several epochs, which are shuffled together."""
        epochs = [len(part.document_index) // len(part.indices) for part in self._parts]
        return [] if max(epochs) == 1 or self._num_samples is None else [self._num_samples, *epochs]

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source. The index is read from where it last
        was."""
        if not isinstance(self._dataset, BlendedDataset):
            return [samples]
        done, counts = self._counted
        if samples < done:
            done, counts = 0, np.zeros(len(self.sources), np.int64)
        counts = counts + np.bincount(self._dataset.dataset_index[done:samples], minlength=len(self.sources))
        self._counted = samples, counts
        return counts.tolist()

    def window_at(self, index: int) -> SampleWindow:
        """Return the source of sample `index`, and its window's number in the shuffled documents of that source, end to
        end as megatron-core lays them."""
        source, index = self._source(index)
        return SampleWindow(source, int(self._parts[source].shuffle_index[index]))

    def _source(self, index: int) -> tuple[int, int]:
        """Return the source of a sample, and the sample's index in this source."""
        if not isinstance(self._dataset, BlendedDataset):
            return 0, index
        return int(self._dataset.dataset_index[index]), int(self._dataset.dataset_sample_index[index])

    def part(self, source: int) -> SampleDataset:
        """Return the samples of one source alone, in the order in which they appear here."""
        part = self._parts[source]
        return part if self._masks is None else _Masked(part, self._masks[source])


class _Masked:
    """megatron-core's samples of one source, of which only those tokens count that the mask names."""

    def __init__(self, dataset: GPTDataset, mask: MaskOfSequences):
        self._dataset = dataset
        # The same order over other values: what it calls tokens and labels are the flags of these.
        self._flags: Any = copy.copy(dataset)
        self._flags.dataset = mask

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        sample, flags = self._dataset[index], self._flags[index]
        return {
            **sample,
            "loss_mask": sample["loss_mask"] * (flags["labels"] & COUNTS != 0),
            "document_begins": flags["tokens"] & BEGINS != 0,
        }


def build_shuffled(
    config: Config,
    tokenizer: Tokenizer,
    files: SplitFiles,
    blend: Blend,
    shares: list[Share],
    digests: Sequence[str],
    num_samples: int | None,
    masks: Mapping[str, Mask] | None = None,
) -> ShuffledDataset:
    """Build one split through megatron-core's builder. Collective, if there are ranks.

    Args:
        digests: `index_digest` of each pair of the blend: another index has another cache.
        num_samples: None for one pass.
        masks: None where all tokens count.
    """
    folder = cache_folder(config.data.data_cache_path, blend.prefixes[0])

    def build() -> ShuffledDataset:
        core_config = GPTDatasetConfig(
            random_seed=config.training.seed,
            sequence_length=config.model.seq_length,
            blend=(list(blend.prefixes), None if blend.weights is None else list(blend.weights)),
            split=files.split_weights,
            path_to_cache=config.data.data_cache_path,
            tokenizer=cast(Any, _CacheKey(tokenizer, digests)),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=config.data.eod_mask_loss,
            create_attention_mask=False,
            mmap_bin_files=not config.data.no_mmap_bin_files,
        )
        # One split at a time: a pass over the validation data has other sources and no weights.
        core_config.split_matrix = cast(Any, [files.bounds if name == files.split else None for name in SPLITS])
        sizes = [num_samples if name == files.split else 0 for name in SPLITS]
        try:
            builder = LocalBuilder(CachedGPTDataset, cast(Any, sizes), lambda: True, core_config)
            dataset = cast(Any, builder.build()[SPLITS.index(files.split)])
        except OSError as error:
            raise StorageError(
                f"the index cache of {files.flag} cannot be written: {error}. "
                "Give --data-cache-path a writable folder, or use --data-order formula, which needs none"
            ) from error
        sources = [
            Source(prefix, share.tokens / config.model.seq_length)
            for prefix, share in zip(blend.prefixes, shares, strict=True)
        ]
        if masks is None:
            return ShuffledDataset(dataset, sources, num_samples)
        return ShuffledDataset(dataset, sources, num_samples, [_by_sequence(masks[one], one) for one in blend.prefixes])

    return one_rank_of_a_node_first(folder, build)


def _by_sequence(mask: Mask, prefix: str) -> MaskOfSequences:
    index = open_index(prefix)
    return MaskOfSequences(mask, index.pointers, index.lengths, index.dtype.itemsize)


class _CacheKey:
    """Stands in for the tokenizer that GPTDataset takes. A tokenizer's identifiers enter the index cache's key, so that
    the data's fingerprints are among them here."""

    # A value that no .bin can hold: GPTDataset would hide real tokens that equal its padding.
    pad = np.iinfo(np.int64).min

    def __init__(self, tokenizer: Tokenizer, digests: Sequence[str]):
        self.vocab_size = tokenizer.vocab_size
        self.eod = tokenizer.eod
        self.unique_identifiers = {**tokenizer.identity(), "data": list(digests)}
