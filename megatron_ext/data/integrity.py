"""Checks that a .bin/.idx pair agrees with its header before megatron-core maps the files, since megatron-core trusts
them.

A truncated .bin otherwise fails hours later, at the sample that reaches the hole, or gives stale memory as tokens.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.config.parse.blend import is_url
from megatron_ext.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION
from megatron_ext.data.stored import exists, local_file, open_bin, read_many
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.terminal import tracked

_BLOCK = 1 << 16  # sequences checked at a time: bounds memory, whatever the size of the index
_TOKENS = 1 << 20  # tokens checked at a time
_SAMPLED_BLOCKS = 64
_SAMPLED_BLOCK = 512  # sequences in a sampled block


def check_indexed_files(prefix: str, *, whole_index_up_to: int | None = None) -> None:
    """Check `<prefix>.idx` against itself and against the size of `<prefix>.bin`.

    Args:
        prefix: path without suffix.
        whole_index_up_to: of an index with more bytes than this, check the header, the sizes, both ends and 64 blocks
            in between, so that a large one is opened at once; default check all of it.

    Raises:
        ConfigurationError: a file is missing.
        DataError: the pair is truncated or altered; the text names the file and the sizes.
    """
    for suffix in (".idx", ".bin"):
        if not exists(prefix, suffix):
            raise ConfigurationError(
                f"data prefix {prefix}: {prefix}{suffix} does not exist; give the path without .bin or .idx, "
                "as --output-prefix of megatron-ext preprocess plus _text_document"
            )
    idx = local_file(prefix, ".idx")
    idx_size, bin_size = idx.stat().st_size, open_bin(prefix).size
    dtype, sequences, document_entries = _read_header(idx, idx_size)
    # Megatron's multimodal index has one more byte per sequence, the mode; GPTDataset does not read it.
    expected = HEADER.size + 12 * sequences + 8 * document_entries
    if idx_size not in (expected, expected + sequences):
        raise DataError(
            f"{idx} has {idx_size} bytes, but its header speaks of {sequences} sequences and {document_entries - 1} "
            f"documents, which take {expected} bytes: the file is truncated or altered. {_REMEDY}"
        )
    sampled = whole_index_up_to is not None and idx_size > whole_index_up_to
    token_bytes = _check_sequences(idx, sequences, dtype.itemsize, sampled)
    if token_bytes != bin_size:
        raise DataError(
            f"{prefix}.bin has {bin_size} bytes, but {idx.name} places {token_bytes} bytes of tokens in it: one of the "
            f"two is truncated or belongs to other data. {_REMEDY}"
        )
    _check_documents(idx, sequences, document_entries, sampled)


def _blocks(count: int, sampled: bool) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the blocks to check: all, one after another, or a few over the whole range and the
    last."""
    if not sampled or count <= _SAMPLED_BLOCKS * _SAMPLED_BLOCK:
        yield from ((first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK))
        return
    for number in range(_SAMPLED_BLOCKS):
        first = number * (count - _SAMPLED_BLOCK) // (_SAMPLED_BLOCKS - 1)
        yield first, first + _SAMPLED_BLOCK


_REMEDY = "Copy both files again, or run megatron-ext preprocess again"


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


def _check_sequences(idx: Path, sequences: int, itemsize: int, sampled: bool) -> int:
    """Check that the sequences lie one after another in the .bin; return where the last one ends, in bytes."""
    if sequences == 0:
        raise DataError(f"{idx} holds no sequence: there is nothing to train on. {_REMEDY}")
    end = 0
    for first, behind in _blocks(sequences, sampled):
        lengths = _read(idx, "<i4", HEADER.size, first, behind).astype(np.int64)
        pointers = _read(idx, "<i8", HEADER.size + 4 * sequences, first, behind)
        # A block that was not reached through the one before it can only be asked whether it follows on itself.
        start = int(pointers[0]) if sampled and first > 0 else end
        ends = start + np.cumsum(lengths) * itemsize
        wrong = (lengths < 0) | (pointers != ends - lengths * itemsize)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(
                f"{idx}: sequence {first + row} of {sequences} has length {lengths[row]} and byte pointer "
                f"{pointers[row]}, which does not follow on the sequence before it: the file is altered. {_REMEDY}"
            )
        end = int(ends[-1])
    return end


def _check_documents(idx: Path, sequences: int, entries: int, sampled: bool) -> None:
    """Check that the document indices rise from 0 to the number of sequences."""
    offset = HEADER.size + 12 * sequences
    before, rising, last = 0, entries > 0, -1
    for first, behind in _blocks(entries, sampled):
        indices = _read(idx, "<i8", offset, first, behind)
        rising &= bool(indices[0] >= before and (np.diff(indices) >= 0).all() and (first > 0 or indices[0] == 0))
        before = last = int(indices[-1])
    if not rising or last != sequences:
        raise DataError(
            f"{idx}: the document indices do not rise from 0 to {sequences}, the number of sequences: "
            f"the file is altered. {_REMEDY}"
        )


def _read(path: Path | str, kind: str | np.dtype, offset: int, first: int, behind: int) -> np.ndarray:
    """Return the entries `first` up to `behind` of an array that begins at byte `offset`.

    They are read, not mapped: the pages of a map count as this process's memory.
    """
    item = np.dtype(kind).itemsize
    return np.fromfile(path, kind, behind - first, offset=offset + first * item)


@dataclass(frozen=True)
class IndexArrays:
    """The arrays of an index file, which are mapped, not read: int32, int64 and int64, as megatron_ext.data.indexed
    says."""

    code: int
    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tokens."""
        return np.dtype(DTYPE_CODES[self.code])


def open_index(prefix: str) -> IndexArrays:
    """Map the index of a pair that `check_indexed_files` has found to be whole."""
    idx = local_file(prefix, ".idx")
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
    file, dtype = open_bin(prefix), index.dtype.newbyteorder("<")
    for first in tracked("checking tokens", range(0, file.size // dtype.itemsize, _TOKENS)):
        block = np.frombuffer(file.read(first * dtype.itemsize, _TOKENS * dtype.itemsize), dtype)
        _check_block(prefix, index, block, first, vocab_size)


def _check_block(prefix: str, index: IndexArrays, block: np.ndarray, first: int, vocab_size: int) -> None:
    """Check the ids of consecutive tokens, the first of which is token `first` of the file."""
    if int(block.max()) < vocab_size and int(block.min()) >= 0:
        return
    row = int(np.argmax((block >= vocab_size) | (block < 0)))
    at = (first + row) * index.dtype.itemsize
    sequence = int(np.searchsorted(index.pointers, at, side="right")) - 1
    document = int(np.searchsorted(index.document_indices, sequence, side="right")) - 1
    raise DataError(
        f"{prefix}.bin: token {int(block[row])} at byte {at} (document {document}) is outside a vocabulary of "
        f"{vocab_size}: the data was made with another tokenizer, or it is damaged. {_REMEDY}"
    )


def check_some_token_ids(prefix: str, vocab_size: int) -> None:
    """Read 256 blocks of 1,024 tokens all over a whole pair, and check them as `check_token_ids` checks all.

    This finds data of another tokenizer before training begins; a single wrong token is found when it is read.
    """
    index = open_index(prefix)
    dtype = index.dtype.newbyteorder("<")
    tokens, size, count = token_count(prefix), 1024, 256
    starts = range(0, tokens, size)
    if len(starts) > count:
        starts = [number * (tokens - size) // (count - 1) for number in range(count)]
    blocks = read_many(prefix, [(first * dtype.itemsize, size * dtype.itemsize) for first in starts])
    for first, block in zip(starts, blocks, strict=True):
        _check_block(prefix, index, np.frombuffer(block, dtype), first, vocab_size)


def token_count(prefix: str) -> int:
    """Return the number of tokens of a pair that `check_indexed_files` has found to be whole."""
    return open_bin(prefix).size // open_index(prefix).dtype.itemsize


@dataclass(frozen=True)
class Share:
    """The part of a pair that belongs to one split: sequences `first` up to `end`, and the tokens in them."""

    first: int
    end: int
    first_token: int
    tokens: int


def share_of(prefix: str, bounds: tuple[float, float]) -> Share:
    """Return the sequences between two fractions of all, rounded as megatron-core rounds. Only a few entries of the
    index are read.

    Args:
        prefix: path without suffix of a checked pair.
        bounds: begin and end, from 0 to 1.

    Raises:
        DataError: the index is altered at one of the two bounds.
    """
    index = open_index(prefix)
    count = len(index.lengths)
    first, end = (round(bound * float(count)) for bound in bounds)

    def tokens_before(sequence: int) -> int:
        if sequence == 0:
            return 0
        before = int(index.pointers[sequence - 1]) + int(index.lengths[sequence - 1]) * index.dtype.itemsize
        if sequence < count and int(index.pointers[sequence]) != before:
            raise DataError(
                f"{prefix}.idx: sequence {sequence} of {count} has byte pointer {index.pointers[sequence]}, which does "
                f"not follow on the sequence before it: the file is altered. {_REMEDY}"
            )
        return before // index.dtype.itemsize

    return Share(first, end, tokens_before(first), tokens_before(end) - tokens_before(first))


def file_fingerprint(path: str) -> str:
    """Return a digest of a file's size, of 64 KiB at either end, and of 64 blocks of 4 KiB in between.

    It is cheap, and the same on every machine: another file under the same name has another one. It does not see every
    change of a single byte in the middle of a large file; `index_digest` does, of an index.
    """
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        return _digest(size, (os.pread(file.fileno(), length, at) for at, length in _probes(size)))


def pair_fingerprint(prefix: str, suffix: str) -> str:
    """Return `file_fingerprint` of a file of a pair, which may lie behind a URL."""
    if suffix != ".bin" or not is_url(prefix):
        return file_fingerprint(str(local_file(prefix, suffix)))
    size = open_bin(prefix).size
    return _digest(size, read_many(prefix, list(_probes(size))))


def _digest(size: int, probes: Iterable[bytes]) -> str:
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    for probe in probes:
        digest.update(probe)
    return digest.hexdigest()


def _probes(size: int) -> Iterator[tuple[int, int]]:
    end, block, count = 1 << 16, 1 << 12, 64
    yield 0, end
    yield max(0, size - end), end
    if size > 2 * end:
        yield from ((end + number * (size - 2 * end) // count, block) for number in range(count))


def index_digest(prefix: str) -> str:
    """Return a digest of the whole index, from which the order of the samples is made."""
    with open(local_file(prefix, ".idx"), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
