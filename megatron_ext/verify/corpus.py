"""Writes a small corpus whose loss masks differ from sample to sample, for comparing runs on real .bin/.idx files."""

from pathlib import Path

import numpy as np

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.tokenizer.byte import ByteTokenizer

SEQ_LENGTH = 32
TRAINING_SAMPLES = 128
VALIDATION_SAMPLES = 13
"""Number of samples, no multiple of any batch: the last global batch of an evaluation is a remainder."""

_LONGEST_DOCUMENT = 3 * SEQ_LENGTH


def write_corpus(folder: Path) -> list[str]:
    """Write training and validation data below `folder`.

    Documents have 1 to 96 tokens, a third of them at most 2. With --eod-mask-loss some samples therefore have many
    more tokens that count than others, and so have the data-parallel ranks.

    Returns:
        The flags that train on it: sample length, paths, tokenizer, the loss mask, and an evaluation of one pass.
    """
    _write(folder / "train", TRAINING_SAMPLES, split=0)
    _write(folder / "valid", VALIDATION_SAMPLES, split=1)
    paths = f"--train-data-path {folder}/train --valid-data-path {folder}/valid --data-cache-path {folder}/cache"
    return f"--seq-length {SEQ_LENGTH} {paths} --tokenizer-type ByteTokenizer --eod-mask-loss --full-validation".split()


def _write(prefix: Path, samples: int, split: int) -> None:
    """Write exactly `samples` samples of SEQ_LENGTH tokens and their labels."""
    left = samples * SEQ_LENGTH + 1
    random = np.random.default_rng(split)
    text = MockDataset(
        vocab_size=ByteTokenizer.eod, seq_length=_LONGEST_DOCUMENT, num_samples=left, seed=0, split=split
    )
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(left):
            longest = 2 if random.random() < 1 / 3 else _LONGEST_DOCUMENT
            words = text[number]["tokens"][: random.integers(1, longest + 1)]
            document = np.append(words, ByteTokenizer.eod)[:left].astype(np.uint16)
            writer.add_tokens(document.tobytes(), [len(document)])
            left -= len(document)
            if left == 0:
                break
