"""What is in a .bin/.idx pair: counts, lengths, the tokens of one document, and a sample as text."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.data.integrity import check_indexed_files, open_index
from megatron_ext.data.stored import open_bin
from megatron_ext.errors import ConfigurationError
from megatron_ext.terminal import printable
from megatron_ext.tokenizer.protocol import Tokenizer

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Summary:
    """The counts of a pair. `histogram[k]` is the number of sequences with 2^k to 2^(k+1) - 1 tokens."""

    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    shortest: int
    longest: int
    histogram: list[int]


def summarize(prefix: str) -> Summary:
    """Read the whole index. Raises as `check_indexed_files` does."""
    check_indexed_files(prefix)
    index = open_index(prefix)
    histogram = np.zeros(32, np.int64)
    tokens = 0
    for first in range(0, len(index.lengths), _BLOCK):
        lengths = index.lengths[first : first + _BLOCK]
        tokens += int(lengths.sum(dtype=np.int64))
        # frexp gives the exponent of 2 exactly, where a logarithm would round.
        histogram += np.bincount(np.frexp(lengths[lengths > 0])[1] - 1, minlength=32)
    empty = sum(
        int((np.diff(index.document_indices[first : first + _BLOCK + 1]) == 0).sum())
        for first in range(0, len(index.document_indices) - 1, _BLOCK)
    )
    return Summary(
        dtype=str(index.dtype),
        documents=len(index.document_indices) - 1,
        empty_documents=empty,
        sequences=len(index.lengths),
        tokens=tokens,
        shortest=int(index.lengths.min()),
        longest=int(index.lengths.max()),
        histogram=histogram[: int(np.flatnonzero(histogram)[-1]) + 1].tolist() if histogram.any() else [],
    )


def document_tokens(prefix: str, document: int) -> list[int]:
    """Return the token ids of document number `document`, from 0.

    Raises:
        ConfigurationError: there is no such document, or a file is missing.
        DataError: the pair is damaged.
    """
    check_indexed_files(prefix)
    index = open_index(prefix)
    count = len(index.document_indices) - 1
    if not 0 <= document < count:
        raise ConfigurationError(f"document {document} of {prefix}: the documents are 0 to {count - 1}")
    first, behind = index.document_indices[document : document + 2].tolist()
    length = int(index.lengths[first:behind].sum())
    if length == 0:
        return []
    found = open_bin(prefix).read(int(index.pointers[first]), length * index.dtype.itemsize)
    return np.frombuffer(found, index.dtype.newbyteorder("<")).tolist()


_DOCUMENT = "--- document"
COLOURS = _GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
"""Every escape sequence of `shown`."""


def shown(tokenizer: Tokenizer, sample: Mapping[str, Any], *, in_color: bool) -> str:
    """Return a sample with a mask as text: what is trained on in green or between ⟦ and ⟧, a line for each document.

    A token is trained on where the loss of predicting it counts, at the token before it. The first token of a sample
    is predicted by none of it.
    """
    ids = [int(token) for token in sample["tokens"]]
    trained = [False, *(bool(counts) for counts in sample["loss_mask"])][: len(ids)]
    documents = list(itertools.accumulate(int(begins) for begins in sample["document_begins"]))
    before, behind = (_GREEN, _PLAIN) if in_color else ("⟦", "⟧")
    text = ""
    runs = itertools.groupby(range(len(ids)), key=lambda place: (documents[place], trained[place]))
    last = None
    for (document, counts), places in runs:
        if document != last and last is not None:
            text += f"\n{_DOCUMENT}\n"
        last = document
        part = printable(tokenizer.decode([ids[place] for place in places]))
        text += f"{before}{part}{behind}" if counts else part
    return text
