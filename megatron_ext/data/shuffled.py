"""--data-order shuffled is megatron-core's order, so that a run can be moved over.

Documents are shuffled for all epochs together, laid end to end, cut into samples of seq_length + 1 tokens, and the
samples are shuffled. megatron-core writes that down in index files, which are kept in a cache.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_ext.config.parse.blend import Blend
from megatron_ext.config.schema import Config
from megatron_ext.data.index_cache import CachedGPTDataset, LocalBuilder, cache_folder
from megatron_ext.data.integrity import Share, open_index
from megatron_ext.data.mask import BEGINS, COUNTS, Mask, MaskOfSequences
from megatron_ext.data.one_rank_per_node import one_rank_of_a_node_first
from megatron_ext.data.samples import SampleDataset, SampleWindow, Source
from megatron_ext.data.splits import SPLITS, SplitFiles
from megatron_ext.errors import StorageError
from megatron_ext.tokenizer.protocol import Tokenizer


class ShuffledDataset:
    """megatron-core's dataset of one split, and what it knows of where its samples come from."""

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

    def place(self, index: int) -> SampleWindow:
        """Return where sample `index` lies: its number is that in megatron-core's stream of shuffled documents."""
        source, index = self._source(index)
        return SampleWindow(source, int(self._parts[source].shuffle_index[index]))

    def _source(self, index: int) -> tuple[int, int]:
        """Return the source of a sample, and its position there."""
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
    """Answers what GPTDataset asks of a tokenizer. Its identifiers enter the index cache's key, so the data's go here
    too."""

    # A value that no .bin can hold: GPTDataset would hide real tokens that equal its padding.
    pad = np.iinfo(np.int64).min

    def __init__(self, tokenizer: Tokenizer, digests: Sequence[str]):
        self.vocab_size = tokenizer.vocab_size
        self.eod = tokenizer.eod
        self.unique_identifiers = {**tokenizer.identity(), "data": list(digests)}
