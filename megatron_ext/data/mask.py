"""The mask that lies next to a .bin/.idx pair: which tokens are trained on, and where documents begin.

    .mask  8 bytes magic | uint32 version | uint32 sequence length that documents were packed to, or 0 | uint8[tokens]

Little-endian; one byte for each token of the .bin, in the same order. Bit 0: the token counts in the loss, as a label.
Bit 1: a document begins with it. The first token of a document never counts: nothing of its document predicts it. A
.bin/.idx pair is complete without a mask, and no program that does not ask for one reads it. No torch here.
"""

import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_ext.data.stored import local_file
from megatron_ext.errors import ConfigurationError, DataError

COUNTS, BEGINS = 1, 2
"""Bits of a token: it counts in the loss; a document begins with it."""

HEADER = struct.Struct("<8sII")
MAGIC = b"TOKMASK\x00"
VERSION = 1
_BLOCK = 1 << 20

_REMEDY = "Copy .bin, .idx and .mask together again, or run megatron-ext preprocess again"


def mask_path(prefix: str | Path) -> Path:
    """Return the path of the mask of a pair on this machine."""
    return Path(f"{prefix}.mask")


def header(packed_to: int) -> bytes:
    """Return the bytes that stand before the flags of the first token."""
    return HEADER.pack(MAGIC, VERSION, packed_to)


class Mask:
    """The mask of a pair, read where it is asked for.

    Args:
        prefix: path without suffix of a checked pair.
        tokens: number of tokens of the pair.

    Raises:
        ConfigurationError: the pair has no mask.
        DataError: the mask is not one, or has not a byte for every token.
    """

    def __init__(self, prefix: str, tokens: int):
        path = local_file(prefix, ".mask")
        if not path.is_file():
            raise ConfigurationError(
                f"{prefix}.mask does not exist: {prefix}.bin has no mask of what is trained on. Make the data with "
                "megatron-ext preprocess --data-format alpaca, sharegpt, messages or completion, or leave out "
                "--assistant-only-loss"
            )
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.packed_to = _packed_to(path, os.pread(self._file, HEADER.size, 0))
        self.tokens = tokens
        size = os.fstat(self._file).st_size - HEADER.size
        if size != tokens:
            raise DataError(
                f"{path} speaks of {size} tokens, but {prefix}.bin has {tokens}: one of the two is truncated or "
                f"belongs to other data. {_REMEDY}"
            )

    def read(self, first: int, count: int) -> np.ndarray:
        """Return the flags of `count` tokens from token `first` on: uint8 [count].

        Raises:
            DataError: the file has become shorter, or a byte is no flags of a token.
        """
        flags = np.frombuffer(os.pread(self._file, count, HEADER.size + first), np.uint8)
        if len(flags) != count:
            raise DataError(f"{self._path} ends before token {first + count}: it was truncated during the run")
        if count and int(flags.max()) > (COUNTS | BEGINS):
            row = int(np.argmax(flags > (COUNTS | BEGINS)))
            raise DataError(
                f"{self._path}: token {first + row} has the flags {int(flags[row])}, more than {COUNTS | BEGINS}: the "
                f"file is damaged. {_REMEDY}"
            )
        return flags

    def check(self) -> int:
        """Read all flags and return how many tokens count. Raises DataError as `read` does."""
        return sum(
            int(np.count_nonzero(self.read(first, min(_BLOCK, self.tokens - first)) & COUNTS))
            for first in range(0, self.tokens, _BLOCK)
        )


def _packed_to(path: Path, header: bytes) -> int:
    if len(header) == HEADER.size:
        magic, version, packed_to = HEADER.unpack(header)
        if (magic, version) == (MAGIC, VERSION):
            return packed_to
    raise DataError(f"{path} is no mask of version {VERSION}: it is truncated or altered. {_REMEDY}")


class MaskOfSequences:
    """A mask as megatron-core's GPTDataset reads tokens: by sequence.

    Args:
        mask: the mask of the pair.
        pointers: byte pointer of each sequence in the .bin.
        lengths: tokens of each sequence.
        itemsize: bytes of a token in the .bin.
    """

    def __init__(self, mask: Mask, pointers: np.ndarray, lengths: np.ndarray, itemsize: int):
        self._mask, self._pointers, self._lengths, self._itemsize = mask, pointers, lengths, itemsize

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return the flags of `length` tokens of sequence `idx` from `offset` on, by default of all that follow."""
        first = int(self._pointers[idx]) // self._itemsize + offset
        count = int(self._lengths[idx]) - offset if length is None else int(length)
        return self._mask.read(first, count)


def copy_flags(prefixes: Sequence[str], packed_to: int, out: BinaryIO) -> None:
    """Write the masks of several pairs as one."""
    out.write(header(packed_to))
    for prefix in prefixes:
        with open(mask_path(prefix), "rb") as source:
            source.seek(HEADER.size)
            while block := source.read(_BLOCK):
                out.write(block)
