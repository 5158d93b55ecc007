"""The files that the tools read: found by name, opened through their compression, hashed on the way.

    find_files(["corpus/", "more-*.jsonl.zst"])  ->  InputFile(path, "json", ".zst"), ...

`-` is the standard input, as JSON lines. A URL of fsspec (s3://bucket/corpus/*.jsonl) names files of a store; a folder
that `datasets.Dataset.save_to_disk` wrote is its Arrow files. Everything is read as a stream, so that memory does not
grow with a file.
"""

import bz2
import codecs
import glob
import gzip
import hashlib
import importlib
import io
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron_ext.config.parse.blend import is_url
from megatron_ext.data.remote import RemoteFile, RemoteStream, entry, file_system, tried_again
from megatron_ext.errors import ConfigurationError, DataError, MemoryExhaustedError
from megatron_ext.untrusted.text import load_json, read_file

Kind = Literal["json", "text", "parquet", "arrow"]
STANDARD_INPUT = "-"
_KINDS: dict[str, Kind] = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet", ".arrow": "arrow"}
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_LOOKED_AT = 1 << 16  # bytes of a file of another name, which tell whether it is text
_HIDDEN = "hidden"
_MOST_KINDS = 10  # named of what is left out
_ACCEPTED = f"{', '.join(_KINDS)}, or one of the first three with {', '.join(_COMPRESSIONS)}"

EXTENSIONS = "of a folder, read only files whose names end so, for example .py .md; default: all that are text"
"""Help of --extensions."""


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

    @cached_property
    def remote(self) -> RemoteFile | None:
        """The file of a store; None for one of this machine."""
        return RemoteFile(self.path) if is_url(self.path) else None

    def size(self) -> int | None:
        """Return the size in bytes on the disk; None for the standard input."""
        if self.remote is not None:
            return self.remote.size
        return None if self.is_standard_input else Path(self.path).stat().st_size

    def state(self) -> list[str | int | None]:
        """Return the file's identity, by which a resumed run knows that the file has not changed: path, size and time
        of change, or for a remote file its version."""
        if self.remote is not None:
            return [self.path, self.remote.size, self.remote.version]
        changed = None if self.is_standard_input else Path(self.path).stat().st_mtime_ns
        return [self.path, self.size(), changed]

    def __getstate__(self) -> dict[str, str]:
        """Return the fields alone, for another process."""
        return {"path": self.path, "kind": self.kind, "compression": self.compression}


def find_files(
    inputs: Sequence[str], extensions: Sequence[str] = (), note: Callable[[str], None] = lambda text: None
) -> list[InputFile]:
    """Return the input files in order: folders and patterns are replaced by the files that they hold, sorted by path.

    Of a folder of this machine, a file with another name is text where its content is (UTF-8).

    Args:
        inputs: values of --input.
        extensions: values of --extensions: how the names of a folder's files end that are read, and no others.
        note: called with the number of files of a folder that are left out, and why.

    Raises:
        ConfigurationError: an input does not exist, is of another kind, a folder holds no such file, or most of its
            bytes would be left out unasked.
    """
    files: list[InputFile] = []
    for name in inputs:
        if name == STANDARD_INPUT:
            files.append(InputFile(name, "json", ""))
            continue
        if is_url(name):
            files += _find_remote(name)
            continue
        for path in _expand(name):
            if (path / "state.json").is_file():
                files += _of_datasets(path)
            elif path.is_dir():
                files += _of_folder(path, tuple(extensions), note)
            elif (file := _classify(path)) is not None:
                files.append(file)
            else:
                raise ConfigurationError(f"--input {path}: the name of an input must end in one of {_ACCEPTED}")
    return files


def _of_folder(folder: Path, extensions: tuple[str, ...], note: Callable[[str], None]) -> list[InputFile]:
    """Return the files of a folder that are read, and note the files that are left out."""
    files: list[InputFile] = []
    left_out: Counter[str] = Counter()
    read_bytes = left_out_bytes = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if extensions:
            reason = "" if path.name.endswith(extensions) else "not of --extensions"
        else:
            reason = "" if _classify(path) else _why_not_text(path, folder)
        if reason == _HIDDEN:
            left_out[_HIDDEN] += 1
        elif reason:
            left_out[f"{path.suffix or path.name} ({reason})"] += 1
            left_out_bytes += path.stat().st_size
        else:
            files.append(_classify(path) or InputFile(str(path), "text", ""))
            read_bytes += path.stat().st_size
    if not files:
        raise ConfigurationError(
            f"--input {folder} is a folder with no {_ACCEPTED} file in it, and no other text"
            f"{' whose name ends in ' + ' or '.join(extensions) if extensions else ''}"
        )
    if left_out:
        kinds = [f"{count} {kind}" for kind, count in left_out.most_common(_MOST_KINDS)]
        more = f" and {len(left_out) - len(kinds)} more kinds" if len(left_out) > len(kinds) else ""
        said = f"read {len(files)} of {len(files) + left_out.total()} files; left out: {', '.join(kinds)}{more}"
        if not extensions and left_out_bytes > read_bytes:
            endings = " ".join(sorted({Path(file.path).suffix or Path(file.path).name for file in files}))
            raise ConfigurationError(
                f"--input {folder}: {said}. These are {left_out_bytes} of {left_out_bytes + read_bytes} bytes: turn "
                f"them into text, or give --extensions {endings} to go on without them"
            )
        note(f"--input {folder}: {said}")
    return files


def _why_not_text(path: Path, folder: Path) -> str:
    """Return why a file whose name says nothing is not read as text; nothing where it is."""
    if any(part.startswith(".") for part in path.relative_to(folder).parts):
        return _HIDDEN
    if path.suffix in _COMPRESSIONS:
        return "compressed"
    with path.open("rb") as file:
        begin = file.read(_LOOKED_AT)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin, final=len(begin) < _LOOKED_AT)
    except UnicodeDecodeError:
        return "not UTF-8"
    return "not text" if b"\0" in begin else ""


def _readable(paths: Sequence[str]) -> list[str]:
    return sorted(path for path in paths if _classify(Path(path)))


def _find_remote(url: str) -> list[InputFile]:
    """Return the files that a URL names: a file, a folder, or a pattern."""
    system, path = file_system(url)
    what = f"--input {url}"
    addresses: list[str] = []
    if any(sign in path for sign in "*?["):
        addresses = _readable(tried_again(what, lambda: system.glob(path)))
    elif (named := entry(what, system, path)) is not None:
        is_folder = named["type"] == "directory"
        addresses = _readable(tried_again(what, lambda: system.find(path))) if is_folder else [path]
    if not addresses:
        raise ConfigurationError(f"--input {url} does not exist, or holds no {_ACCEPTED} file")
    files = []
    for one in addresses:
        file = _classify(Path(one))
        if file is None:
            raise ConfigurationError(f"--input {url}: the name of an input must end in one of {_ACCEPTED}")
        files.append(InputFile(system.unstrip_protocol(one), file.kind, file.compression))
    return files


def _of_datasets(folder: Path) -> list[InputFile]:
    """Return the Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote, in their order."""
    try:
        state = load_json(read_file(folder / "state.json", 1 << 26))
        fields = {name.removeprefix("_"): value for name, value in state.items()}
        names = [one["filename"] for one in fields["data_files"]]
        rows = fields.get("indices_data_files") or fields.get("indices_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--input {folder}: state.json is not one of the library datasets: {error}") from error
    if rows:
        raise ConfigurationError(
            f"--input {folder} holds an order of its rows next to them: save it again after dataset.flatten_indices()"
        )
    if any(Path(name).name != name for name in names):
        raise ConfigurationError(f"--input {folder}: state.json names a file outside of the folder")
    return [InputFile(str(folder / name), "arrow", "") for name in names]


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
    if kind is None or (kind in ("parquet", "arrow") and compression):
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
        """Read the rest of the file, after the end of the compressed data for instance; returns the hash of the
        whole."""
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
        MemoryExhaustedError: inside the block, decompressing needs more memory than can be had.
    """
    source = open_bytes(file)
    hashing = HashingReader(source)  # type: ignore[arg-type]
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    if file.compression == ".zst":
        damage += (zstd_module(file.path).ZstdError,)
    try:
        yield _decompressed(hashing, file), hashing
        if file.remote is not None:
            file.remote.check_unchanged()
    except (MemoryError, *damage) as error:
        # zstd's error has no number for this case, but these words of its library.
        if file.compression and (isinstance(error, MemoryError) or "not enough memory" in str(error)):
            raise _out_of_memory(file) from error
        if isinstance(error, MemoryError):
            raise
        raise _damaged(file, hashing, error) from error
    except OSError as error:
        if error.errno is not None or not file.compression:
            raise
        raise _damaged(file, hashing, error) from error  # bz2 names damage so, without an error number
    finally:
        if not file.is_standard_input:
            source.close()


def open_bytes(file: InputFile) -> Any:
    """Open a file as a stream of its bytes as they are stored, which the standard input alone cannot seek in."""
    if file.is_standard_input:
        return sys.stdin.buffer
    return open(file.path, "rb", buffering=0) if file.remote is None else RemoteStream(file.remote)


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
        zstd = zstd_module(file.path)
        largest = zstd.DecompressionParameter.window_log_max  # by default 128 MB; public dumps have up to 2 GB
        return zstd.ZstdFile(raw, options={largest: largest.bounds()[1]})
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


def _out_of_memory(file: InputFile) -> MemoryExhaustedError:
    long = " What zstd --long has made needs up to 2 GB (zstd -lv shows its window)." * (file.compression == ".zst")
    return MemoryExhaustedError(
        f"{file.path}: memory has run out while it was decompressed.{long} Give this process more, or decompress the "
        "file elsewhere and read that"
    )


def _damaged(file: InputFile, hashing: HashingReader, error: Exception) -> DataError:
    return DataError(
        f"{file.path}: the compressed data is damaged or ends too soon, at or before byte {hashing.bytes_read}: "
        f"{error}. Copy the file again"
    )
