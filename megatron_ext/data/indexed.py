"""Writing Megatron's .bin/.idx pair: all tokens in one file, where each sequence lies in the other.

    .idx   9 bytes magic | uint64 version | uint8 dtype code | uint64 sequences | uint64 documents + 1
           | int32 lengths[sequences] | int64 byte pointers[sequences] | int64 document indices[documents + 1]
    .bin   the tokens, nothing else

Little-endian. A document is a run of sequences: document d owns the sequences from document_indices[d] up to
document_indices[d + 1], and an empty document owns none. Reading is megatron-core's `IndexedDataset`.
"""

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_ext.data.mask import HEADER as MASK_HEADER
from megatron_ext.data.mask import header as mask_header
from megatron_ext.data.mask import mask_path
from megatron_ext.durable import naming, only_files, sync, sync_file
from megatron_ext.errors import ConfigurationError

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
_LENGTH = np.dtype("<i4")
_DOCUMENTS_AT_ONCE = 1 << 20
HEADER = struct.Struct("<9sQBQQ")


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the dtype of a .bin file's tokens: uint16 below 65,500 ids (Megatron's bound), else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


@dataclass(frozen=True)
class Written:
    """Counts that a writer has committed, from which another writer can continue."""

    token_bytes: int = 0
    documents: int = 0
    sequences: int = 0


class IndexedWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`; they appear under these names only when whole.

    Until `finish`, all lies in `<name>.partial`. A pair of the same name is replaced; there is no moment at which one
    file of the old pair stands next to one of the new pair. As a context manager it finishes on success and removes the
    partial files on an exception. Memory does not grow with the number of documents.

    Args:
        prefix: path without suffix.
        dtype: dtype of the tokens.
        start: what `commit` of an earlier, killed writer returned; what it wrote after that is dropped.
        packed_to: write `<prefix>.mask` too; the sequence length that documents are packed to, or 0. None for no mask:
            one of an earlier pair is removed.

    Raises:
        ConfigurationError: another process is writing these files.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: type[np.uint16] | type[np.int32],
        start: Written = Written(),
        packed_to: int | None = None,
    ):
        self._bin_path, self._idx_path = (Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx"))
        self._mask_path = mask_path(prefix)
        self._lengths_path = Path(f"{prefix}.lengths")
        self._dtype = np.dtype(dtype)
        self.written = start
        self._bin = _open_locked(_partial(self._bin_path), start.token_bytes)
        self._lengths = _open_locked(_partial(self._lengths_path), start.documents * _LENGTH.itemsize)
        self._mask: BinaryIO | None = None
        if packed_to is not None:
            flags = start.token_bytes // self._dtype.itemsize
            self._mask = _open_locked(_partial(self._mask_path), MASK_HEADER.size + flags if flags else 0)
            if not flags:
                self._mask.write(mask_header(packed_to))

    @staticmethod
    def holds(prefix: str | Path, written: Written, mask_itemsize: int | None = None) -> bool:
        """Return whether the partial files of an earlier writer exist, with at least the bytes that it has committed.

        Args:
            prefix: path without suffix.
            written: the counts that `commit` of the earlier writer returned.
            mask_itemsize: bytes of a token, where it wrote a mask too.
        """
        sizes = {".bin": written.token_bytes, ".lengths": written.documents * _LENGTH.itemsize}
        if mask_itemsize is not None:
            sizes[".mask"] = MASK_HEADER.size + written.token_bytes // mask_itemsize
        paths = {_partial(Path(f"{prefix}{suffix}")): size for suffix, size in sizes.items()}
        return all(path.is_file() and path.stat().st_size >= size for path, size in paths.items())

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:
            self.finish()
        else:
            self.discard()

    def add_tokens(
        self,
        tokens: bytes | memoryview,
        document_lengths: Sequence[int] | np.ndarray,
        flags: np.ndarray | None = None,
    ) -> None:
        """Append documents of one sequence each.

        Args:
            tokens: the tokens of all these documents, already in the file's dtype.
            document_lengths: integers, tokens in each document; a document of none gets no sequence.
            flags: where a mask is written, uint8, the flags of each token as `megatron_ext.data.mask` says.
        """
        lengths = np.asarray(document_lengths, _LENGTH)
        token_bytes = memoryview(tokens).nbytes
        assert token_bytes == int(lengths.sum(dtype=np.int64)) * self._dtype.itemsize
        assert (flags is None) == (self._mask is None)
        if self._mask is not None and flags is not None:
            assert len(flags) * self._dtype.itemsize == token_bytes
            with naming(self._mask_path):
                self._mask.write(flags.data)
        with naming(self._bin_path):
            self._bin.write(tokens)
            self._lengths.write(lengths.tobytes())
        self.written = Written(
            self.written.token_bytes + token_bytes,
            self.written.documents + len(lengths),
            self.written.sequences + int(np.count_nonzero(lengths)),
        )

    def commit(self) -> Written:
        """Put everything so far on the disk, so that a later writer can start from here."""
        with naming(self._bin_path):
            for file in self._files():
                sync_file(file)
        return self.written

    def finish(self) -> None:
        """Write the index, put everything on the disk, and give both files their names."""
        self.commit()
        with naming(self._idx_path), open(_partial(self._idx_path), "wb", opener=only_files) as idx:
            self._write_index(idx)
            sync_file(idx)
        self._idx_path.unlink(missing_ok=True)
        self._mask_path.unlink(missing_ok=True)
        os.replace(_partial(self._bin_path), self._bin_path)
        if self._mask is not None:
            os.replace(_partial(self._mask_path), self._mask_path)
        os.replace(_partial(self._idx_path), self._idx_path)
        self.close()
        _partial(self._lengths_path).unlink()
        sync(self._idx_path.parent)

    def _write_index(self, idx: BinaryIO) -> None:
        code = _CODE_OF[self._dtype.type]
        idx.write(HEADER.pack(MAGIC, VERSION, code, self.written.sequences, self.written.documents + 1))
        for lengths in self._length_blocks():
            idx.write(lengths[lengths > 0].data)
        position = 0
        for lengths in self._length_blocks():
            ends = position + np.cumsum(lengths[lengths > 0], dtype="<i8") * self._dtype.itemsize
            idx.write(np.concatenate([np.array([position], "<i8"), ends])[:-1].data)
            position = int(ends[-1]) if len(ends) else position
        idx.write(np.zeros(1, "<i8").data)
        sequence = 0
        for lengths in self._length_blocks():
            indices = sequence + np.cumsum(lengths > 0, dtype="<i8")
            idx.write(indices.data)
            sequence = int(indices[-1])

    def _length_blocks(self) -> Iterator[np.ndarray]:
        """Yield the number of tokens of each document, some documents at a time."""
        with open(_partial(self._lengths_path), "rb") as file:
            while block := file.read(_LENGTH.itemsize * _DOCUMENTS_AT_ONCE):
                yield np.frombuffer(block, _LENGTH)

    def descriptors(self) -> list[int]:
        """Return the descriptors of the open files, which are locked."""
        return [file.fileno() for file in self._files()]

    def _files(self) -> list[BinaryIO]:
        return [self._bin, self._lengths, *([] if self._mask is None else [self._mask])]

    def close(self) -> None:
        """Let go of the files and leave them for a later writer."""
        for file in self._files():
            file.close()

    def discard(self) -> None:
        """Forget everything written so far."""
        self.close()
        for path in (self._bin_path, self._idx_path, self._lengths_path, self._mask_path):
            _partial(path).unlink(missing_ok=True)


def _open_locked(path: Path, size: int) -> BinaryIO:
    """Open a file for appending behind its first `size` bytes, for this process alone."""
    file = open(path, "ab", opener=only_files)  # noqa: SIM115 (closed by the writer)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigurationError(
            f"another process is writing {path}: wait for it, or choose another --output-prefix"
        ) from error
    file.truncate(size)
    return file


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
