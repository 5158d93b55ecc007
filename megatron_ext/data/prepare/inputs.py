"""The files that the tools read: found by name, opened through their compression, hashed on the way.

    find_files(["corpus/", "more-*.jsonl.zst"])  ->  InputFile(path, "json", ".zst"), ...

`-` is the standard input, as JSON lines. Everything is read as a stream, so that memory does not grow with a file.
"""

import bz2
import glob
import gzip
import hashlib
import importlib
import io
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_ext.errors import ConfigurationError, DataError

Kind = Literal["json", "text", "parquet"]
STANDARD_INPUT = "-"
_KINDS: dict[str, Kind] = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_ACCEPTED = f"{', '.join(_KINDS)}, or one of the first three with {', '.join(_COMPRESSIONS)}"


@dataclass(frozen=True)
class InputFile:
    """One input: where it is, what it holds, and how it is compressed ("" if it is not)."""

    path: str
    kind: Kind
    compression: str

    @property
    def is_standard_input(self) -> bool:
        """Whether this is the standard input."""
        return self.path == STANDARD_INPUT

    def size(self) -> int | None:
        """Return the size in bytes on the disk; None for the standard input."""
        return None if self.is_standard_input else Path(self.path).stat().st_size

    def state(self) -> list[str | int | None]:
        """Return what tells that the file is still the one that a run began with: path, size and time of change."""
        changed = None if self.is_standard_input else Path(self.path).stat().st_mtime_ns
        return [self.path, self.size(), changed]


def find_files(inputs: Sequence[str]) -> list[InputFile]:
    """Return the input files in order: folders and patterns are replaced by the files that they hold, sorted by path.

    Raises:
        ConfigurationError: an input does not exist, is of another kind, or a folder holds no such file.
    """
    files: list[InputFile] = []
    for name in inputs:
        if name == STANDARD_INPUT:
            files.append(InputFile(name, "json", ""))
            continue
        for path in _expand(name):
            if path.is_dir():
                found = sorted(file for file in path.rglob("*") if _classify(file) and file.is_file())
                if not found:
                    raise ConfigurationError(f"--input {path} is a folder with no {_ACCEPTED} file in it")
                files += [file for file in map(_classify, found) if file]
            elif (file := _classify(path)) is not None:
                files.append(file)
            else:
                raise ConfigurationError(f"--input {path}: the name of an input must end in one of {_ACCEPTED}")
    return files


def _expand(name: str) -> list[Path]:
    if Path(name).exists():
        return [Path(name)]
    matches = sorted(glob.glob(name, recursive=True))
    if not matches:
        raise ConfigurationError(f"--input {name} does not exist")
    return [Path(match) for match in matches]


def _classify(path: Path) -> InputFile | None:
    compression = path.suffix if path.suffix in _COMPRESSIONS else ""
    kind = _KINDS.get(Path(path.name.removesuffix(compression)).suffix)
    if kind is None or (kind == "parquet" and compression):
        return None
    return InputFile(str(path), kind, compression)


class HashingReader(io.RawIOBase):
    """Passes a binary stream through and counts its bytes and their SHA-256."""

    def __init__(self, source: BinaryIO):
        self._source = source
        self._digest = hashlib.sha256()
        self.bytes_read = 0

    def readable(self) -> bool:
        """Return True: this is a stream to read from."""
        return True

    def readinto(self, buffer) -> int:
        """Fill `buffer` with the next bytes and return their number."""
        count = self._source.readinto(buffer)  # type: ignore[attr-defined]  (BinaryIO lacks it, every stream has it)
        self._digest.update(memoryview(buffer)[:count])
        self.bytes_read += count
        return count

    def finish(self) -> str:
        """Read what is left, behind the end of the compressed data for instance; returns the hash of the whole."""
        block = bytearray(1 << 20)
        while self.readinto(block):
            pass
        return self._digest.hexdigest()


@contextmanager
def open_input(file: InputFile) -> Iterator[tuple[io.BufferedIOBase, HashingReader]]:
    """Open a file for reading its decompressed bytes; the second value yielded knows the bytes on the disk.

    Raises:
        ConfigurationError: the compression needs a package that is not installed.
        DataError: inside the block, the compressed data is damaged or ends too soon.
    """
    source = sys.stdin.buffer if file.is_standard_input else open(file.path, "rb", buffering=0)  # noqa: SIM115
    hashing = HashingReader(source)  # type: ignore[arg-type]
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    if file.compression == ".zst":
        damage += (zstd_module(file.path).ZstdError,)
    try:
        yield _decompressed(hashing, file), hashing
    except damage as error:
        raise _damaged(file, hashing, error) from error
    except OSError as error:
        if error.errno is not None or not file.compression:
            raise
        raise _damaged(file, hashing, error) from error  # bz2 names damage so, without an error number
    finally:
        if not file.is_standard_input:
            source.close()


def _decompressed(hashing: HashingReader, file: InputFile) -> io.BufferedIOBase:
    raw = io.BufferedReader(hashing, 1 << 20)
    if file.compression and not raw.peek(1):
        raise EOFError("it is empty")  # which gzip takes for nothing at all
    if file.compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)  # type: ignore[arg-type]
    if file.compression == ".bz2":
        return bz2.BZ2File(raw)
    if file.compression == ".xz":
        return lzma.LZMAFile(raw)
    if file.compression == ".zst":
        return zstd_module(file.path).ZstdFile(raw)
    return raw


def zstd_module(path: str):
    """Return Python's own module from 3.14 on, else the package that brings it to older versions."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return import_for(name, "backports.zstd", path)


def import_for(module: str, package: str, path: str):
    """Import what reading `path` needs.

    Raises:
        ConfigurationError: the package is not installed; the text names it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"--input {path} needs the package {package}: pip install {package}") from error


def _damaged(file: InputFile, hashing: HashingReader, error: Exception) -> DataError:
    return DataError(
        f"{file.path}: the compressed data is damaged or ends too soon, at or before byte {hashing.bytes_read}: "
        f"{error}. Copy the file again"
    )
