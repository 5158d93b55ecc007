"""Copies a file from its beginning to its end, in blocks, with its checksum: how weights move between shards and
safetensors.

    gather(path, parts)            writes the file, from parts that lie elsewhere; returns its CRC-32
    scatter(path, parts, size)     reads the file, whose parts belong elsewhere; returns its CRC-32

Each byte is read once and written once, and its checksum computed while it lies in the processor's cache. Threads take
turns at the blocks: reading, writing and CRC-32 all leave Python's lock. Each has one small buffer, used again and
again (fresh memory costs as much as the copy), so that memory does not grow with the file.
"""

import functools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ext.durable import naming

BLOCK = 1 << 20
"""Bytes of a block, which fits a core's own cache."""

_THREADS = min(4, os.cpu_count() or 1)
_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


@dataclass(frozen=True)
class FilePart:
    """A part of a file that is gathered or scattered."""

    length: int
    divisible: ClassVar[bool] = True
    """Whether any range of the part can be read or written alone. A part that cannot be divided should not be much
    larger than a block."""

    def gather(self, start: int, target: memoryview) -> None:
        """Fill `target` with bytes of this part, from its byte `start` on; the caller then writes them to the file."""
        raise NotImplementedError

    def scatter(self, start: int, source: memoryview) -> None:
        """Store `source`, bytes that the caller read from the file: this part's bytes from its byte `start` on."""
        raise NotImplementedError


class Files:
    """Open files, each opened once. Its threads share them: all reading and writing says where."""

    def __init__(self, flags: int):
        self._flags = flags | os.O_CLOEXEC
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, self._flags)
            return self._open[path]

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


@dataclass(frozen=True)
class Literal(FilePart):
    """Bytes that are known."""

    content: bytes

    def gather(self, start: int, target: memoryview) -> None:
        target[:] = self.content[start : start + len(target)]


@dataclass(frozen=True)
class Zeros(FilePart):
    """Zeros, for padding."""

    def gather(self, start: int, target: memoryview) -> None:
        target[:] = bytes(len(target))


@dataclass(frozen=True)
class SkippedBytes(FilePart):
    """Bytes that are in the file and written nowhere."""

    def scatter(self, start: int, source: memoryview) -> None:
        pass


@dataclass(frozen=True)
class FileRange(FilePart):
    """Bytes that lie, unchanged, in another file."""

    files: Files
    path: Path
    offset: int

    def gather(self, start: int, target: memoryview) -> None:
        read_exactly(self.files[self.path], self.offset + start, target, self.path)

    def scatter(self, start: int, source: memoryview) -> None:
        with naming(self.path):
            write_all(self.files[self.path], self.offset + start, source)


@dataclass(frozen=True)
class ComputedBytes(FilePart):
    """Bytes that are computed, on their way in either direction."""

    make: Callable[[memoryview], None]
    divisible: ClassVar[bool] = False

    def gather(self, start: int, target: memoryview) -> None:
        self.make(target)

    def scatter(self, start: int, source: memoryview) -> None:
        self.make(source)


def gather(path: Path, parts: Iterable[FilePart]) -> tuple[int, int]:
    """Write a new file that consists of these parts; returns its size and its CRC-32.

    Raises:
        OSError: the file cannot be written, or a part cannot be read.
        EOFError: a part is shorter than it should be.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def move(block: _Block, buffer: memoryview) -> int:
        for part, start, first, length in block.pieces:
            part.gather(start, buffer[first : first + length])
        checksum = zlib.crc32(buffer)
        with naming(path):
            write_all(descriptor, block.start, buffer)
        return checksum

    try:
        return _run(parts, move)
    finally:
        os.close(descriptor)


def scatter(path: Path, parts: Iterable[FilePart], *, checksum: bool) -> tuple[int, int]:
    """Read a file that consists of these parts and put each where it belongs; returns its size and its CRC-32.

    Args:
        checksum: without it, `SkippedBytes` are not read, and the CRC-32 means nothing.
    Raises:
        OSError: the file cannot be read, or a part cannot be written.
        EOFError: the file is shorter than its parts.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def move(block: _Block, buffer: memoryview) -> int:
        if not checksum and all(isinstance(part, SkippedBytes) for part, *_ in block.pieces):
            return 0
        read_exactly(descriptor, block.start, buffer, path)
        value = zlib.crc32(buffer) if checksum else 0
        for part, start, first, length in block.pieces:
            part.scatter(start, buffer[first : first + length])
        return value

    try:
        return _run(parts, move)
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, offset: int, target: memoryview, path: Path) -> None:
    """Fill `target` from a file.

    Raises:
        EOFError: the file ends before it is full.
    """
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise EOFError(f"{path} ends at {offset}, {len(target)} bytes too early")
        target, offset = target[count:], offset + count


def write_all(descriptor: int, offset: int, source: memoryview) -> None:
    """Write all of `source` at an offset of a file."""
    while source:
        count = os.pwrite(descriptor, source, offset)
        source, offset = source[count:], offset + count


def combined_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two byte strings one after the other, from the CRC-32 of each and the length in bytes of the
    second.

    The CRCs are polynomials over the field of two elements: first * x^(8 length) + second, modulo the CRC's own.
    """
    return _product(_power(length), first) ^ second


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials of degree < 32, modulo the CRC's own."""
    product = 0
    for power in range(31, -1, -1):
        if one >> power & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@functools.lru_cache(1024)
def _power(length: int) -> int:
    """Return x^(8 length), by squaring."""
    result, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            result = _product(result, square)
        square, length = _product(square, square), length >> 1
    return result


@dataclass
class _Block:
    """The part of the file that one thread moves at once."""

    start: int
    length: int
    pieces: list[tuple[FilePart, int, int, int]]
    """Part, where in the part, where in the block, length."""


def _blocks(parts: Iterable[FilePart]) -> Iterator[_Block]:
    block = _Block(0, 0, [])
    for part in parts:
        done = 0
        while done < part.length:
            room = BLOCK - block.length
            if room <= 0 or (not part.divisible and block.length and part.length > room):
                yield block
                block = _Block(block.start + block.length, 0, [])
                continue
            length = min(room, part.length - done) if part.divisible else part.length
            block.pieces.append((part, done, block.length, length))
            block.length += length
            done += length
    if block.length:
        yield block


def _run(parts: Iterable[FilePart], move: Callable[[_Block, memoryview], int]) -> tuple[int, int]:
    """Let threads move all blocks; returns size and CRC-32 of all. The first failure ends it and is raised."""
    waiting, lock = iter(enumerate(_blocks(parts))), threading.Lock()
    done: dict[int, tuple[int, int]] = {}
    failures: list[BaseException] = []

    def work() -> None:
        buffer = memoryview(bytearray(BLOCK))
        try:
            while not failures:
                with lock:
                    number, block = next(waiting, (None, None))
                if number is None or block is None:
                    return
                if len(buffer) < block.length:
                    buffer = memoryview(bytearray(block.length))
                done[number] = block.length, move(block, buffer[: block.length])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, name=f"copy {number}", daemon=True) for number in range(1, _THREADS)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    size = checksum = 0
    for number in range(len(done)):
        length, value = done[number]
        checksum, size = combined_crc32(checksum, value, length), size + length
    return size, checksum
