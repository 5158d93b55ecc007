"""Manifests of .bin/.idx pairs: which tokenizer made a pair, and its checksums block by block.

`megatron-ext preprocess --output-prefix data/corpus` writes data/corpus_text_document.bin and .idx, and
data/corpus_manifest.json; `megatron-ext merge-datasets --output-prefix data/all` writes data/all_manifest.json. A pair
without one, as Megatron-LM writes it, or one that was replaced since, has no known tokenizer. A run compares its
tokenizer with the manifest's, and the checksums while it reads the data.

    "checksums": {"data/corpus_text_document": {"block_bytes": 16777216,
                                                "crc32": {".bin": ["6fa1e2d0", ...], ".idx": ["0c1d...", ...]}}}

A disk or a copy that damages data mostly gives ids that are still of the vocabulary, above all zeros: no other check
sees these. CRC-32 guards against disks and networks, not against people, and takes a core a second for some GB. No
torch here.
"""

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.stored import local_file, open_bin
from megatron_ext.errors import DataError, StorageError
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.tokenizer.tokenizer_record import describe_tokenizer, same_tokenizer, short_record, tokenizer_record
from megatron_ext.untrusted.text import load_json, read_file

_LARGEST = 1 << 26  # bytes; one of a thousand input files has some 200,000


@dataclass(frozen=True)
class MadeWith:
    """The tokenizer that made a pair, and the manifest that names it."""

    tokenizer: Mapping[str, Any]
    """The tokenizer's record as `megatron_ext.tokenizer.tokenizer_record` writes it; older ones are shorter."""
    manifest: str


def made_with(prefix: str) -> MadeWith | None:
    """Return the tokenizer that made `<prefix>.bin`; None where no manifest next to it speaks of a file of its size."""
    try:
        size = open_bin(prefix).size
    except (OSError, StorageError):
        return None
    for stem in _possible_stems(prefix):
        path = f"{stem}_manifest.json"
        content = read_manifest(local_file(stem, "_manifest.json"))
        if content is not None and size in [output.get("token_bytes") for output in content["outputs"].values()]:
            return MadeWith(content["tokenizer"], path)
    return None


def manifests_of(prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the content of every manifest whose name fits `<prefix>.bin`, the longest name first."""
    for stem in _possible_stems(prefix):
        content = read_manifest(local_file(stem, "_manifest.json"))
        if content is not None:
            yield content


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the content of a manifest with the parts that are used here; None where it is missing or not one.

    Anybody may have put it next to the data: one that is larger or deeper than any manifest is not one.
    """
    try:
        content = load_json(read_file(path, _LARGEST))
        parts = (content["tokenizer"], content["outputs"], *content["outputs"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if all(isinstance(part, dict) for part in parts) else None


def _possible_stems(prefix: str) -> Iterator[str]:
    """Yield a/b_text_document, a/b_text and a/b for `a/b_text_document`: a manifest is named after one of these."""
    folder, _, name = prefix.rpartition("/")
    words = name.split("_")
    for count in range(len(words), 0, -1):
        stem = "_".join(words[:count])
        yield f"{folder}/{stem}" if folder or prefix.startswith("/") else stem


@dataclass(frozen=True)
class Judged:
    """An error or a warning that another tokenizer than the run's made the data."""

    text: str
    is_wrong: bool
    """Whether this is an error; otherwise it is a warning."""


def judge(what: str, made: MadeWith, tokenizer: Tokenizer) -> Judged | None:
    """Return an error or a warning if another tokenizer than the run's made the data; None if the run's made it.

    NullTokenizer knows only its number of ids. If the data or the run has it, a difference is an error only if the
    data may have ids outside of the run's vocabulary (benchmarks over real data, and data with ids of other programs).

    Args:
        what: names the data, as `--data-path corpus_text_document`.
        made: the tokenizer of the data.
        tokenizer: the tokenizer of the run.
    """
    own = short_record(tokenizer)
    if same_tokenizer(made.tokenizer, own):
        return None
    said = f"{what} was made with {describe_tokenizer(made.tokenizer)}, as {made.manifest} says"
    if "NullTokenizer" in (made.tokenizer.get("type"), own["type"]):
        ids = made.tokenizer.get("vocab_size")
        is_covered = isinstance(ids, int) and ids <= tokenizer.vocab_size
        return Judged(f"{said}; the run takes its ids as those of {describe_tokenizer(own)}", not is_covered)
    if same_tokenizer(made.tokenizer, tokenizer_record(tokenizer)):
        return None
    return Judged(f"{said}, but the run's tokenizer is {describe_tokenizer(own)}: the same ids are other text", True)


BLOCK = 1 << 24
"""Bytes that share a checksum: 10 TB of tokens have 600,000 checksums, 7 MB of manifest."""

_SUFFIXES = (".bin", ".idx")
_PIECE = 1 << 20  # bytes read at a time
_BLOCKS_AT_THE_START = 8
_SHARE_OF_A_CORE = 0.01
_LEAST_BLOCK, _LARGEST_BLOCK = 1 << 10, 1 << 30


@dataclass(frozen=True)
class Block:
    """A range of a file, and the checksum that its manifest has of it."""

    path: str
    first: int
    """Offset of the block's first byte in the file."""
    size: int
    crc32: str


def checksums(prefixes: Sequence[str], block: int = BLOCK) -> dict[str, Any]:
    """Return the checksums of whole pairs, for their manifest.

    Args:
        block: bytes that share a checksum.
    Raises:
        OSError: a file cannot be read.
    """
    return {
        prefix: {"block_bytes": block, "crc32": {suffix: _of_file(prefix + suffix, block) for suffix in _SUFFIXES}}
        for prefix in prefixes
    }


def known_blocks(prefix: str) -> list[Block]:
    """Return the blocks of a pair of which its manifest has checksums; none where it has none, or there is no pair."""
    try:
        sizes = {suffix: os.path.getsize(prefix + suffix) for suffix in _SUFFIXES}
    except OSError:
        return []  # who opens the pair says what is wrong with it
    for manifest in manifests_of(prefix):
        entry = _entry(manifest, prefix, sizes[".bin"])
        if entry is None:
            continue
        blocks = [block for suffix in _SUFFIXES for block in _blocks(prefix + suffix, sizes[suffix], entry, suffix)]
        if blocks:
            return blocks
    return []


def damage(block: Block) -> str | None:
    """Describe the damage of a block; None if its checksum is the manifest's."""
    try:
        with open(block.path, "rb", buffering=0) as file:
            checksum = _crc32(file.fileno(), block.first, block.size)
    except OSError as error:
        return f"{block.path} cannot be read: {error.strerror}"
    if checksum == block.crc32:
        return None
    return (
        f"{block.path}: bytes {block.first} to {block.first + block.size - 1} have the checksum {checksum} instead of "
        f"{block.crc32}, which the manifest next to it gives: they were changed or damaged since they were written"
    )


REMEDY = "Copy the file again, or run megatron-ext preprocess again; --verify-data off trains on it as it is."


def first_damage(blocks: Sequence[Block]) -> str | None:
    """Describe the damage of the first damaged block of several; None if all are whole."""
    return next((text for block in blocks if (text := damage(block)) is not None), None)


def some_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Return the few blocks, from the first to the last, that are read before the first step."""
    count = min(len(blocks), _BLOCKS_AT_THE_START)
    if count < 2:
        return list(blocks)
    return [blocks[number * (len(blocks) - 1) // (count - 1)] for number in range(count)]


class BackgroundCheck:
    """Compares blocks one after another in a thread of its own.

    The checks of all processes of a machine together compute for 1% of the time of one core, which reads some 10 MB a
    second. A file that was replaced or removed after the start is not checked, because the run still reads the old one,
    which it has open. A file that cannot be read now is not checked either: the training reports it if it needs it.

    Args:
        blocks: the share of this process.
        pause: called with the seconds to rest after each piece; returns whether to go on.
        processes: the number of processes of the machine that check.
    """

    def __init__(self, blocks: Sequence[Block], pause: Callable[[float], bool] | None = None, *, processes: int = 1):
        self._blocks = list(blocks)
        self._files = {path: _identity(path) for path in dict.fromkeys(block.path for block in self._blocks)}
        self._rest = processes / _SHARE_OF_A_CORE - 1
        self._closed = threading.Event()
        self._pause = pause or (lambda seconds: not self._closed.wait(seconds))
        self._damage: str | None = None
        self.checked = 0
        self._thread = threading.Thread(target=self._run, name="data-check", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise an error if a damaged block was found so far.

        Raises:
            DataError: a block is not as it was written.
        """
        if self._damage is not None:
            raise DataError(f"{self._damage}. {REMEDY}")

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        for block in self._blocks:
            if not self._is_the_same(block):
                continue
            self._damage = self._compared(block)
            if self._damage is not None or self._closed.is_set():
                return
            self.checked += 1

    def _compared(self, block: Block) -> str | None:
        """Describe the damage of a block, which is read in pieces with rests between them.

        None if the block is whole, the check was closed, or the file was replaced or cannot be read.
        """
        value = 0
        try:
            with open(block.path, "rb", buffering=0) as file:
                for first, size in _pieces(block.first, block.size):
                    began = time.thread_time()
                    value = zlib.crc32(os.pread(file.fileno(), size, first), value)
                    if not self._pause((time.thread_time() - began) * self._rest):
                        return None
        except OSError:
            return None
        # Once more, and in words: a read that went wrong once, or a file that is being replaced, is no damage.
        text = None if f"{value:08x}" == block.crc32 else damage(block)
        return text if self._is_the_same(block) else None

    def _is_the_same(self, block: Block) -> bool:
        identity = self._files[block.path]
        return identity is not None and _identity(block.path) == identity


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file, which tell it from another file of that name; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _entry(manifest: Mapping[str, Any], prefix: str, size: int) -> Mapping[str, Any] | None:
    """Return the checksums that the manifest has for this pair, even after the pair was moved or renamed; None if no
    entry, or more than one, has its size."""
    outputs, checksums = manifest["outputs"], manifest.get("checksums")
    if not isinstance(checksums, dict):
        return None
    sizes = {name: output.get("token_bytes") for name, output in outputs.items()}
    fitting = [name for name in sizes if sizes[name] == size and isinstance(checksums.get(name), dict)]
    named = [name for name in fitting if Path(name).name == Path(prefix).name]
    chosen = named if len(named) == 1 else fitting
    return checksums[chosen[0]] if len(chosen) == 1 else None


def _blocks(path: str, size: int, entry: Mapping[str, Any], suffix: str) -> Iterator[Block]:
    """Yield the blocks of a file; none where its manifest entry makes no sense."""
    length, by_suffix = entry.get("block_bytes"), entry.get("crc32")
    values = by_suffix.get(suffix) if isinstance(by_suffix, dict) else None
    if type(length) is not int or not _LEAST_BLOCK <= length <= _LARGEST_BLOCK or type(values) is not list:
        return
    starts = range(0, size, length)
    if len(values) != len(starts) or not all(type(value) is str and len(value) == 8 for value in values):
        return
    for first, value in zip(starts, values, strict=True):
        yield Block(path, first, min(length, size - first), value)


def _of_file(path: str, block: int) -> list[str]:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return [_crc32(file.fileno(), first, min(block, size - first)) for first in range(0, size, block)]


def _crc32(descriptor: int, first: int, size: int) -> str:
    value = 0
    for at, length in _pieces(first, size):
        value = zlib.crc32(os.pread(descriptor, length, at), value)
    return f"{value:08x}"


def _pieces(first: int, size: int) -> Iterator[tuple[int, int]]:
    return ((at, min(_PIECE, first + size - at)) for at in range(first, first + size, _PIECE))
