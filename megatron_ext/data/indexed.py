"""Writing Megatron's .bin/.idx pair: all tokens in one file, where each sequence lies in the other.

    .idx   9 bytes magic | uint64 version | uint8 dtype code | uint64 sequences | uint64 documents + 1
           | int32 lengths[sequences] | int64 byte pointers[sequences] | int64 document indices[documents + 1]
    .bin   the tokens, nothing else

Little-endian. A document is a run of sequences: document d owns the sequences from document_indices[d] up to
document_indices[d + 1], and an empty document owns none. Reading is megatron-core's `IndexedDataset`.
"""

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_CODE_OF = {dtype: code for code, dtype in DTYPE_CODES.items()}
HEADER = struct.Struct("<9sQBQQ")


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The dtype of a .bin file's tokens: uint16 below 65,500 ids (Megatron's bound), else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`; they appear under these names only when whole.

    Until `finish`, all lies in `<name>.partial`. A pair of the same name is replaced; there is no moment at which
    one file of the old pair stands beside one of the new pair. As a context manager it finishes on success and
    removes the partial files on an exception.
    """

    def __init__(self, prefix: str | Path, dtype: type[np.uint16] | type[np.int32]):
        self._bin_path, self._idx_path = (Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx"))
        self._dtype = np.dtype(dtype)
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._bin = open(_partial(self._bin_path), "wb")  # noqa: SIM115 (closed by finish or discard)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:
            self.finish()
        else:
            self.discard()

    def add_tokens(self, tokens: bytes, document_lengths: Sequence[int]) -> None:
        """Append documents of one sequence each.

        Args:
            tokens: the tokens of all these documents, already in the file's dtype.
            document_lengths: tokens in each document; a document of none gets no sequence.
        """
        assert len(tokens) == sum(document_lengths) * self._dtype.itemsize
        self._bin.write(tokens)
        for length in document_lengths:
            if length:
                self._lengths.append(length)
            self._document_indices.append(len(self._lengths))

    def finish(self) -> None:
        """Write the index, put everything on the disk, and give both files their names."""
        _close_durably(self._bin)
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
        indices = np.frombuffer(self._document_indices, dtype=np.int64)
        with open(_partial(self._idx_path), "wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, _CODE_OF[self._dtype.type], len(lengths), len(indices)))
            for values, little_endian in ((lengths, "<i4"), (pointers, "<i8"), (indices, "<i8")):
                idx.write(values.astype(little_endian, copy=False).data)
            _close_durably(idx)
        self._idx_path.unlink(missing_ok=True)
        os.replace(_partial(self._bin_path), self._bin_path)
        os.replace(_partial(self._idx_path), self._idx_path)
        _sync_folder(self._idx_path.parent)

    def discard(self) -> None:
        """Forget everything written so far."""
        self._bin.close()
        for path in (self._bin_path, self._idx_path):
            _partial(path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _close_durably(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
