"""Is a .bin/.idx pair what its header says? Asked before megatron-core maps the files, which trusts them.

A truncated .bin otherwise fails hours later, at the sample that reaches the hole, or gives stale memory as tokens.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION
from megatron_ext.errors import ConfigurationError, DataError

_BLOCK = 1 << 20  # sequences checked at a time: bounds memory, whatever the size of the index


def check_indexed_files(prefix: str) -> None:
    """Check `<prefix>.idx` against itself and against the size of `<prefix>.bin`.

    Raises:
        ConfigurationError: a file is missing.
        DataError: the pair is truncated or altered; the text names the file and the sizes.
    """
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise ConfigurationError(
                f"data prefix {prefix}: {path} does not exist; give the path without .bin or .idx, "
                "as --output-prefix of tools/preprocess_data.py plus _text_document"
            )
    idx_size, bin_size = idx.stat().st_size, bin_.stat().st_size
    dtype, sequences, document_entries = _read_header(idx, idx_size)
    # Megatron's multimodal index has one more byte per sequence, the mode; GPTDataset does not read it.
    expected = HEADER.size + 12 * sequences + 8 * document_entries
    if idx_size not in (expected, expected + sequences):
        raise DataError(
            f"{idx} has {idx_size} bytes, but its header speaks of {sequences} sequences and {document_entries - 1} "
            f"documents, which take {expected} bytes: the file is truncated or altered. {_REMEDY}"
        )
    token_bytes = _check_sequences(idx, sequences, dtype.itemsize)
    if token_bytes != bin_size:
        raise DataError(
            f"{bin_} has {bin_size} bytes, but {idx.name} places {token_bytes} bytes of tokens in it: one of the two "
            f"is truncated or belongs to other data. {_REMEDY}"
        )
    _check_documents(idx, sequences, document_entries)


_REMEDY = "Copy both files again, or run tools/preprocess_data.py again"


def _read_header(idx: Path, size: int) -> tuple[np.dtype, int, int]:
    if size < HEADER.size:
        raise DataError(f"{idx} has {size} bytes, less than the {HEADER.size} of a header: truncated. {_REMEDY}")
    with open(idx, "rb") as file:
        magic, version, code, sequences, document_entries = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC or version != VERSION:
        raise DataError(
            f"{idx} begins with {magic!r} and version {version}, not with {MAGIC!r} and {VERSION}: "
            f"it is no index of Megatron's format, or it is altered. {_REMEDY}"
        )
    if code not in DTYPE_CODES or not np.issubdtype(DTYPE_CODES[code], np.integer):
        raise DataError(f"{idx} names token dtype code {code}, which is no integer type (1-5 or 8). {_REMEDY}")
    return np.dtype(DTYPE_CODES[code]), sequences, document_entries


def _check_sequences(idx: Path, sequences: int, itemsize: int) -> int:
    """Check that the sequences lie one after another in the .bin; returns where the last one ends, in bytes."""
    if sequences == 0:
        raise DataError(f"{idx} holds no sequence: there is nothing to train on. {_REMEDY}")
    lengths = np.memmap(idx, "<i4", "r", offset=HEADER.size, shape=(sequences,))
    pointers = np.memmap(idx, "<i8", "r", offset=HEADER.size + 4 * sequences, shape=(sequences,))
    end = 0
    for first in range(0, sequences, _BLOCK):
        block = lengths[first : first + _BLOCK].astype(np.int64)
        ends = end + np.cumsum(block) * itemsize
        wrong = (block < 0) | (pointers[first : first + _BLOCK] != ends - block * itemsize)
        if wrong.any():
            at = first + int(np.argmax(wrong))
            raise DataError(
                f"{idx}: sequence {at} of {sequences} has length {lengths[at]} and byte pointer {pointers[at]}, which "
                f"does not follow on the sequence before it: the file is altered. {_REMEDY}"
            )
        end = int(ends[-1])
    return end


def _check_documents(idx: Path, sequences: int, entries: int) -> None:
    """Check that the document indices rise from 0 to the number of sequences."""
    offset = HEADER.size + 12 * sequences
    indices = np.memmap(idx, "<i8", "r", offset=offset, shape=(entries,)) if entries else np.zeros(0, np.int64)
    rising = all(
        (np.diff(indices[first : first + _BLOCK + 1]) >= 0).all() for first in range(0, max(entries - 1, 1), _BLOCK)
    )
    if entries < 1 or indices[0] != 0 or indices[-1] != sequences or not rising:
        raise DataError(
            f"{idx}: the document indices do not rise from 0 to {sequences}, the number of sequences: "
            f"the file is altered. {_REMEDY}"
        )


@dataclass(frozen=True)
class IndexArrays:
    """The arrays of an index file, mapped, not read: int32, int64 and int64, as megatron_ext.data.indexed says."""

    code: int
    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return np.dtype(DTYPE_CODES[self.code])


def open_index(prefix: str) -> IndexArrays:
    """Map the index of a pair that `check_indexed_files` has found to be whole."""
    idx = Path(f"{prefix}.idx")
    dtype, sequences, entries = _read_header(idx, idx.stat().st_size)
    code = next(code for code, kind in DTYPE_CODES.items() if kind == dtype)

    def part(kind: str, offset: int, count: int) -> np.ndarray:
        return np.memmap(idx, kind, "r", offset=HEADER.size + offset, shape=(count,))

    return IndexArrays(
        code,
        lengths=part("<i4", 0, sequences),
        pointers=part("<i8", 4 * sequences, sequences),
        document_indices=part("<i8", 12 * sequences, entries),
    )


def check_token_ids(prefix: str, vocab_size: int) -> None:
    """Read all tokens of a whole pair and check that every one is below the vocabulary's size and not negative.

    Raises:
        DataError: one is not; the text names the first such token and its document.
    """
    index = open_index(prefix)
    tokens = np.memmap(f"{prefix}.bin", index.dtype.newbyteorder("<"), "r")
    for first in range(0, len(tokens), _BLOCK):
        block = tokens[first : first + _BLOCK]
        if int(block.max()) >= vocab_size or int(block.min()) < 0:
            at = first + int(np.argmax((block >= vocab_size) | (block < 0)))
            sequence = int(np.searchsorted(index.pointers, at * index.dtype.itemsize, side="right")) - 1
            document = int(np.searchsorted(index.document_indices, sequence, side="right")) - 1
            raise DataError(
                f"{prefix}.bin: token {int(tokens[at])} at byte {at * index.dtype.itemsize} (document {document}) is "
                f"outside a vocabulary of {vocab_size}: the data was made with another tokenizer, or it is damaged. "
                f"{_REMEDY}"
            )


def sequence_lengths(prefix: str) -> np.ndarray:
    """Tokens in each sequence of a checked pair: int32 [sequences], mapped, not read."""
    idx = Path(f"{prefix}.idx")
    _, sequences, _ = _read_header(idx, idx.stat().st_size)
    return np.memmap(idx, "<i4", "r", offset=HEADER.size, shape=(sequences,))


def fingerprint(prefix: str) -> str:
    """A digest of both files' sizes and of 64 KiB at either end of each: cheap, and the same on every machine.

    It keys the cache of sample indices, so that other data under the same name never meets an old cache.
    """
    digest = hashlib.sha256()
    for suffix in (".idx", ".bin"):
        path = Path(f"{prefix}{suffix}")
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with open(path, "rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read(1 << 16))
    return digest.hexdigest()
