"""The datasets of a run: megatron-core's sample order over .bin/.idx files, an order by formula, or synthetic tokens.

    datasets = build_datasets(config, tokenizer, Splits(train=samples_of_the_run, valid=1, test=0))
    datasets.train[0]["tokens"]     # [seq]

The training dataset repeats its documents as often as its length needs. Validation and test are one pass over their
documents; the last, incomplete sample is dropped, as in Megatron. Torch is imported by the sample orders that need it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.config.parse.blend import Blend
from megatron_ext.config.schema import Config
from megatron_ext.data.fill_in_the_middle import FillInTheMiddle, Rearrangement
from megatron_ext.data.formula_order import FormulaDataset, FormulaSource
from megatron_ext.data.integrity import (
    Share,
    check_indexed_files,
    check_some_token_ids,
    index_digest,
    share_of,
    token_count,
)
from megatron_ext.data.mask import Mask
from megatron_ext.data.samples import Samples
from megatron_ext.data.splits import SPLITS, SplitFiles, split_files
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

_WHOLE_INDEX_UP_TO = 1 << 24
"""Largest size in bytes of an .idx that is read whole at the start under --data-order formula, which needs only its
ends."""


@dataclass(frozen=True)
class Splits[T]:
    """Holds one value each for training, validation and test."""

    train: T
    valid: T
    test: T


def build_datasets(config: Config, tokenizer: Tokenizer, num_samples: Splits[int]) -> Splits[Samples | None]:
    """Build the datasets. Every rank must call this at the same time: one rank of a node writes the index cache.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer that made the data.
        num_samples: train: samples that the run consumes. valid, test: 0 for no such dataset; otherwise one pass over
            the documents, however many samples that is (for --mock-data, this number of samples).

    Returns:
        For each split the dataset, or None where there is none.

    Raises:
        ConfigurationError: a file is missing, or a split holds too few tokens.
        DataError: a .bin/.idx pair is truncated or altered, or a sample of its tokens is outside the vocabulary.
        StorageError: the index cache cannot be written.
    """
    datasets: dict[str, Samples | None] = dict.fromkeys(SPLITS)
    digests: dict[str, str] = {}
    for number, split in enumerate(SPLITS):
        wanted = getattr(num_samples, split)
        if wanted == 0:
            continue
        if config.data.mock_data:
            datasets[split] = _mock(config, tokenizer, wanted, number)
            continue
        files = split_files(config, split)
        if files is not None:
            new = [prefix for prefix in dict.fromkeys(files.blend.prefixes) if prefix not in digests]
            digests |= _checked(new, config, tokenizer)
            built = _build(config, tokenizer, files, digests, wanted if split == "train" else None)
            datasets[split] = _rearranged(built, config, tokenizer, number) if config.data.fim_data else built
    return Splits(**datasets)


def _rearranged(samples: Samples, config: Config, tokenizer: Tokenizer, split: int) -> Samples:
    """Return the samples of a split as --fim-data rearranges them."""
    change = Rearrangement.of(config, tokenizer)
    return FillInTheMiddle(samples, change, [config.training.seed, split], eod_mask_loss=config.data.eod_mask_loss)


def _checked(prefixes: Sequence[str], config: Config, tokenizer: Tokenizer) -> dict[str, str]:
    """Check pairs, and return the digests of their indices, from which megatron-core's order is made: empty texts for
    --data-order formula, which reads a bounded part of each file, on all ranks. Otherwise this is collective."""
    by_formula = config.data.data_order == "formula"

    def check() -> dict[str, str]:
        for prefix in prefixes:
            check_indexed_files(prefix, whole_index_up_to=_WHOLE_INDEX_UP_TO if by_formula else None)
            check_some_token_ids(prefix, tokenizer.vocab_size)
        return {f"{prefix}.idx": "" if by_formula else index_digest(prefix) for prefix in prefixes}

    if by_formula:
        results = check()
    else:
        from megatron_ext.data.one_rank_per_node import read_once_per_node

        results = read_once_per_node(check)
    return dict(zip(prefixes, results.values(), strict=True))


def _mock(config: Config, tokenizer: Tokenizer, num_samples: int, split: int) -> MockDataset:
    return MockDataset(
        vocab_size=config.data.vocab_size or tokenizer.vocab_size,
        seq_length=config.model.seq_length,
        num_samples=num_samples,
        seed=config.training.seed,
        split=split,
    )


def _build(
    config: Config, tokenizer: Tokenizer, files: SplitFiles, digests: Mapping[str, str], num_samples: int | None
) -> Samples:
    """Build one split; `num_samples` None means one pass."""
    by_formula = config.data.data_order == "formula"
    shares = [share_of(prefix, files.bounds) for prefix in files.blend.prefixes]
    masks = _masks(config, files) if config.data.assistant_only_loss else None
    # The order by formula reads packed documents whole; megatron-core's takes one token more for the last label.
    packed = by_formula and masks is not None and all(mask.packed_to for mask in masks.values())
    needed = config.model.seq_length + (0 if packed else 1)
    blend, shares = _usable(config, files, shares, needed, one_pass=num_samples is None)
    if by_formula:
        return _by_formula(config, tokenizer, files.split, blend, shares, num_samples, masks or {})
    from megatron_ext.data.shuffled_order import build_shuffled

    own = [digests[prefix] for prefix in blend.prefixes]
    dataset = build_shuffled(config, tokenizer, files, blend, shares, own, num_samples, masks)
    if num_samples is not None and len(dataset) < num_samples:
        raise ConfigurationError(
            f"{files.flag} without weights is one pass over {len(blend.prefixes)} sources, {len(dataset)} samples, "
            f"but the run takes {num_samples}: give each source a weight, which lets it repeat, or shorten the run"
        )
    return dataset


def _masks(config: Config, files: SplitFiles) -> dict[str, Mask]:
    """Return the mask of each pair, by its prefix."""
    masks = {}
    for prefix in files.blend.prefixes:
        mask = masks[prefix] = Mask(prefix, token_count(prefix))
        if mask.packed_to not in (0, config.model.seq_length):
            raise ConfigurationError(
                f"{files.flag} {prefix} was packed to sequences of {mask.packed_to} tokens, and --seq-length "
                f"{config.model.seq_length} would cut them: use --seq-length {mask.packed_to}, or preprocess the data "
                f"again with --seq-length {config.model.seq_length}"
            )
    return masks


def _by_formula(
    config: Config,
    tokenizer: Tokenizer,
    split: str,
    blend: Blend,
    shares: list[Share],
    num_samples: int | None,
    masks: dict[str, Mask],
) -> FormulaDataset:
    def key(number: int) -> bytes:
        return hashlib.sha256(f"sample order:{config.training.seed}:{split}:{number}".encode()).digest()

    parts = [
        FormulaSource(prefix, share, config.model.seq_length, key(number), masks.get(prefix))
        for number, (prefix, share) in enumerate(zip(blend.prefixes, shares, strict=True))
    ]
    return FormulaDataset(parts, blend.weights, num_samples, tokenizer.eod if config.data.eod_mask_loss else None)


def _fixes(config: Config, files: SplitFiles, share: Share) -> str:
    """Return what to do where a split has too few tokens for a sample."""
    fixes = ["give more data"]
    parts = (config.data.split or "").split(",")
    if files.split == "test" and config.data.data_path and len(parts) == len(SPLITS):
        fixes.append(f"leave the test out with --split {float(parts[0]) + float(parts[2]):g},{parts[1]},0")
    fixes.append(f"--train-data-path and --valid-data-path instead of --data-path with --split {config.data.split}")
    if share.tokens > 1:
        fixes.append("a smaller --seq-length")
    return ", ".join(fixes[:-1]) + f", or {fixes[-1]}"


def _usable(
    config: Config, files: SplitFiles, shares: list[Share], needed: int, *, one_pass: bool
) -> tuple[Blend, list[Share]]:
    """Leave out of a pass the files whose share has less than the `needed` tokens of a sample; elsewhere that is an
    error."""
    prefixes = files.blend.prefixes
    enough = [number for number, share in enumerate(shares) if share.tokens >= needed]
    if len(enough) < len(prefixes) and not (one_pass and enough):
        smallest = min(range(len(shares)), key=lambda number: shares[number].tokens)
        share, more = shares[smallest], "" if needed == config.model.seq_length else " + 1"
        raise ConfigurationError(
            f"{files.flag} {prefixes[smallest]} gives {files.split} {share.end - share.first} sequences with "
            f"{share.tokens} tokens, but one sample takes {needed} (--seq-length{more}): {_fixes(config, files, share)}"
        )
    if not one_pass:
        return files.blend, shares
    # A pass takes each source once, so weights would say nothing.
    return Blend(tuple(prefixes[number] for number in enough)), [shares[number] for number in enough]
