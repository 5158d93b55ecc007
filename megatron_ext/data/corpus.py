"""The datasets of a run: megatron-core's GPTDataset over .bin/.idx files, or synthetic ones.

    datasets = build_datasets(config, tokenizer, Splits(train=samples_of_the_run, valid=1, test=0), lambda: True)
    datasets.train[0]["tokens"]     # [seq]

Sample order is megatron-core's: documents are shuffled per epoch, laid end to end, cut into samples of seq_length + 1
tokens, and the samples are shuffled. The training dataset repeats its documents as often as its length needs.
Validation and test are one pass over their documents; the last, incomplete sample is dropped, as in Megatron.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_ext.config.blend import Blend, read_blend
from megatron_ext.config.schema import Config
from megatron_ext.data.integrity import check_indexed_files, fingerprint, sequence_lengths
from megatron_ext.data.loader import SampleDataset
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.tokenizer.protocol import Tokenizer

SPLITS = ("train", "valid", "test")  # megatron-core's order


@dataclass(frozen=True)
class Splits[T]:
    """One value each for training, validation and test."""

    train: T
    valid: T
    test: T


def build_datasets(
    config: Config, tokenizer: Tokenizer, num_samples: Splits[int], is_built_on_this_rank: Callable[[], bool]
) -> Splits[SampleDataset | None]:
    """Build the datasets. Every rank must call this at the same time: rank 0 writes the index cache, then all read it.

    Args:
        config: the resolved configuration.
        tokenizer: the one that made the data.
        num_samples: train: samples that the run consumes. valid, test: 0 for no such dataset; otherwise one pass over
            the documents, however many samples that is (for --mock-data, this number of samples).
        is_built_on_this_rank: false where a rank reads no data (a middle pipeline stage). True on rank 0.

    Returns:
        For each split the dataset, or None where there is none or this rank does not build it.

    Raises:
        ConfigurationError: a file is missing, or a split holds too few tokens.
        DataError: a .bin/.idx pair is truncated or altered.
        StorageError: the index cache cannot be written, or this node does not see what rank 0 wrote.
    """
    datasets: dict[str, SampleDataset | None] = dict.fromkeys(SPLITS)
    for number, split in enumerate(SPLITS):
        wanted = getattr(num_samples, split)
        if wanted == 0:
            continue
        if config.data.mock_data:
            if is_built_on_this_rank():
                datasets[split] = _mock(config, tokenizer, wanted, number)
            continue
        source = _source(config, split)
        if source is not None:
            datasets[split] = _build(
                config, tokenizer, source, wanted if split == "train" else None, is_built_on_this_rank
            )
    return Splits(**datasets)


def describe_sample(dataset: SampleDataset, index: int) -> str:
    """Sample number, and the file that it comes from, for error texts."""
    source: Any = dataset
    if isinstance(dataset, BlendedDataset):
        source = dataset.datasets[dataset.dataset_index[index]]
    path = getattr(source, "dataset_path", None)
    return f"sample {index} of {path}.bin" if path else f"sample {index}"


@dataclass(frozen=True)
class _Source:
    """Where one split comes from: files, and the share of their sequences."""

    split: str
    flag: str
    blend: Blend
    split_weights: str  # as --split
    share: tuple[float, float]  # begin and end of the split's sequences, as fractions of all


def _mock(config: Config, tokenizer: Tokenizer, num_samples: int, split: int) -> MockDataset:
    return MockDataset(
        vocab_size=config.data.vocab_size or tokenizer.vocab_size,
        seq_length=config.model.seq_length,
        num_samples=num_samples,
        seed=config.training.seed,
        split=split,
    )


def _source(config: Config, split: str) -> _Source | None:
    data = config.data
    words = getattr(data, f"{split}_data_path")
    if data.data_path:
        flag, blend, split_weights = "--data-path", read_blend(data.data_path), data.split
    elif words:
        flag, blend = f"--{split}-data-path", read_blend(words)
        split_weights = ",".join("1" if name == split else "0" for name in SPLITS)
        if len(blend.prefixes) == 1:
            blend = Blend(blend.prefixes)  # as in megatron-core, where a lone weight would change the number of epochs
    else:
        return None
    share = convert_split_vector_to_split_matrix(parse_and_normalize_split(split_weights))[SPLITS.index(split)]
    return None if share is None else _Source(split, flag, blend, split_weights, share)


def _build(
    config: Config,
    tokenizer: Tokenizer,
    source: _Source,
    num_samples: int | None,
    is_built_on_this_rank: Callable[[], bool],
) -> SampleDataset | None:
    """One split through megatron-core's builder; `num_samples` None means one pass."""
    # On all ranks alike: they must agree on the number of barriers, and on an error.
    blend = _usable(config, source, one_pass=num_samples is None)
    core_config = GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        blend=(list(blend.prefixes), None if blend.weights is None else list(blend.weights)),
        split=source.split_weights,
        path_to_cache=config.data.data_cache_path,
        tokenizer=cast(Any, _CacheKey(tokenizer, blend.prefixes)),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.data.eod_mask_loss,
        create_attention_mask=False,
    )
    # One split at a time: a pass over the validation data has other sources and no weights.
    core_config.split_matrix = cast(Any, [source.share if name == source.split else None for name in SPLITS])
    sizes = [num_samples if name == source.split else 0 for name in SPLITS]
    try:
        builder = BlendedMegatronDatasetBuilder(GPTDataset, cast(Any, sizes), is_built_on_this_rank, core_config)
        dataset = cast(SampleDataset | None, builder.build()[SPLITS.index(source.split)])
    except Exception as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError):
            raise StorageError(
                f"the index cache of {source.flag} cannot be written, or another node's rank 0 wrote it where this "
                f"node cannot see it: {cause}. Give --data-cache-path a writable folder that all nodes share"
            ) from error
        raise
    if dataset is not None and num_samples is not None and len(dataset) < num_samples:
        raise ConfigurationError(
            f"{source.flag} without weights is one pass over {len(blend.prefixes)} sources, {len(dataset)} samples, "
            f"but the run takes {num_samples}: give each source a weight, which lets it repeat, or shorten the run"
        )
    return dataset


def _usable(config: Config, source: _Source, *, one_pass: bool) -> Blend:
    """Check the files, and leave out of a pass those whose share is too small for one sample."""
    needed = config.model.seq_length + 1
    counts = {prefix: _tokens_of_share(prefix, source) for prefix in source.blend.prefixes}
    enough = tuple(prefix for prefix in source.blend.prefixes if counts[prefix][1] >= needed)
    if len(enough) < len(source.blend.prefixes) and not (one_pass and enough):
        prefix, (sequences, tokens) = min(counts.items(), key=lambda item: item[1][1])
        raise ConfigurationError(
            f"{source.flag} {prefix} gives {source.split} {sequences} sequences with {tokens} tokens, but one sample "
            f"takes {needed} (--seq-length + 1): give more data, --train-data-path and --valid-data-path instead of "
            f"--data-path with --split {config.data.split}, or a smaller --seq-length"
        )
    # A pass takes each source once, so weights would say nothing.
    return Blend(enough) if one_pass else source.blend


def _tokens_of_share(prefix: str, source: _Source) -> tuple[int, int]:
    """Sequences and tokens that the split gets of one source, rounded as megatron-core rounds."""
    check_indexed_files(prefix)
    lengths = sequence_lengths(prefix)
    first, end = (round(bound * float(len(lengths))) for bound in source.share)
    return end - first, int(lengths[first:end].sum(dtype=np.int64))


class _CacheKey:
    """What GPTDataset asks of a tokenizer. Its identifiers enter the index cache's key, so the data's go here too."""

    # A value that no .bin can hold: GPTDataset would hide real tokens that equal its padding.
    pad = np.iinfo(np.int64).min

    def __init__(self, tokenizer: Tokenizer, prefixes: tuple[str, ...]):
        self.vocab_size = tokenizer.vocab_size
        self.eod = tokenizer.eod
        self.unique_identifiers = {**tokenizer.identity(), "data": [fingerprint(prefix) for prefix in prefixes]}
