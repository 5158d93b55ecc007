"""Small corpora, as preprocessing leaves them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.data.indexed import IndexedWriter


def write_corpus(prefix: Path, tokens: int) -> None:
    """Documents of 50 tokens below 61, each a noisy count, so that there is something to learn."""
    random = np.random.default_rng(0)
    text = (np.cumsum(random.choice([1, 1, 1, 2], tokens)) % 61).astype(np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(text.tobytes(), [50] * (tokens // 50))


def write_windows(prefix: Path, windows: int, seed: int, seq_length: int = 8) -> None:
    """Documents of random tokens below 61, each a sample long."""
    tokens = np.random.default_rng(seed).integers(0, 61, windows * seq_length + 1).astype(np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(tokens.tobytes(), [seq_length] * (windows - 1) + [seq_length + 1])


def corpus_of(folder: Path, *lengths: int) -> str:
    """Documents of 0, 1, 2 ... with these lengths."""
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    with IndexedWriter(folder / "text", np.uint16) as writer:
        at = 0
        for length in lengths:
            writer.add_tokens(tokens[at : at + length].tobytes(), [length])
            at += length
    return str(folder / "text")


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: Any = np.uint16) -> str:
    """Documents of these tokens; return the name of the pair."""
    with IndexedWriter(prefix, dtype) as writer:
        lengths = np.array([len(document) for document in documents])
        writer.add_tokens(np.array([token for document in documents for token in document], dtype).tobytes(), lengths)
    return str(prefix)
