"""Documents out of files, in the order of the files: the input side of the tools.

A .jsonl file holds one JSON object a line, a .parquet or .arrow file one document a row, a .txt file one document, or
several with a separator. The reading process only cuts the files into blocks of whole records; parsing happens where
the block ends up (`RawDocument.texts`). A block knows where the next one begins, so that reading can go on from that
place.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BufferedIOBase
from typing import Any, NamedTuple

import numpy as np

from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare.inputs import InputFile, open_input
from megatron_ext.plugins.prepare.long_texts import check_utf8, split_strings
from megatron_ext.plugins.prepare.parquet import read_rows, row_count
from megatron_ext.tokenizer.tokenizer_protocol import LONG, Text

try:
    from orjson import loads as _fast_loads  # 5 times as fast as json; what it refuses, json judges
except ImportError:
    _fast_loads = None

_BRACE, _LINE_END = b"{\n"
BLOCK_BYTES = 1 << 20  # blocks are about so large, or as large as one record
MOST_RECORD = 1 << 30
"""Largest size in bytes of one record: a compressed file of a few kilobytes can hold a line that no memory does."""
_MOST_KEYS_NAMED = 20


class RawDocument(NamedTuple):
    """One JSON line (bytes), one text document (bytes), or one parquet row (column -> value), not yet looked at."""

    file: str
    position: int  # line of a JSON file, document of a text file, row of a parquet file; from 1
    payload: bytes | memoryview | dict[str, Any]  # of a long text: UTF-8
    is_json: bool

    @property
    def where(self) -> str:
        """File and line, row or document number of the record, for messages."""
        return f"{self.file}:{self.position}"

    def texts(self, keys: Sequence[str]) -> list[Text]:
        """Return the document's text under each key; a text document has one text whatever the key. Long ones are
        UTF-8.

        Raises:
            DataError: the record is not UTF-8, not a JSON object, or a key is missing or holds no text.
        """
        if isinstance(self.payload, dict):
            return self._values(self.payload, keys)
        if len(self.payload) > LONG:
            long_texts = self._long_texts(self.payload, keys)
            if long_texts is not None:
                return long_texts
        if self.is_json and _fast_loads is not None:
            try:
                fields = _fast_loads(self.payload)
                if isinstance(fields, dict):
                    return self._values(fields, keys)
            except ValueError:
                pass  # json below decides, and words the error
        try:
            text = str(self.payload, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(self._not_utf8(error)) from error
        return self._values(self._parse(text), keys) if self.is_json else [text for _ in keys]

    def fields(self) -> dict[str, Any]:
        """Return all fields of a JSON line or a parquet row.

        Raises:
            DataError: the record is not UTF-8, not a JSON object, or a piece of a text file.
        """
        if isinstance(self.payload, dict):
            return self.payload
        if not self.is_json:
            raise DataError(f"{self.where}: a text file has no fields; give JSON lines or parquet (--data-format)")
        try:
            return self._parse(str(self.payload, "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(self._not_utf8(error)) from error

    def _not_utf8(self, error: UnicodeDecodeError) -> str:
        return (
            f"{self.where}: not UTF-8 at byte {error.start}: {error.reason}; convert the file (iconv -f LATIN1 "
            "-t UTF-8, if that is its encoding), or leave such documents out with --on-error skip"
        )

    def _long_texts(self, payload: bytes | memoryview, keys: Sequence[str]) -> list[Text] | None:
        """Return the texts of `texts` for a long record; None if the usual way has to judge the record."""
        if self.is_json:
            fields = split_strings(payload)
            return None if fields is None else self._values(fields, keys)
        try:
            check_utf8(payload := bytes(payload))
        except UnicodeDecodeError:
            return None
        return [payload for _ in keys]

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.where}: not a line of JSON: {error}") from error
        if not isinstance(fields, dict):
            raise DataError(f"{self.where}: a JSON object is wanted on each line, this is {type(fields).__name__}")
        return fields

    def _values(self, fields: dict[str, Any], keys: Sequence[str]) -> list[Text]:
        for key in keys:
            if not isinstance(fields.get(key), (str, bytes)):
                what = f"holds {type(fields[key]).__name__}, not text" if key in fields else "is missing"
                raise DataError(f'{self.where}: key "{key}" {what}; the keys are {_named(fields)} (--json-keys)')
        return [fields[key] for key in keys]


def _named(fields: Iterable[str]) -> str:
    names = sorted(fields)
    more = f", and {len(names) - _MOST_KEYS_NAMED} more" if len(names) > _MOST_KEYS_NAMED else ""
    return f"{[name[:100] for name in names[:_MOST_KEYS_NAMED]]}{more}"


@dataclass(frozen=True)
class ReadPosition:
    """Where a reader stands: in which file, after how many bytes (decompressed) or rows, before which record."""

    file: int = 0
    offset: int = 0
    position: int = 1


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file: bytes of whole JSON lines, or a list of text documents or of rows."""

    file: str
    position: int
    payload: bytes | bytearray | list[bytes | None] | list[dict[str, Any]]  # None: an empty piece, no document
    size: int  # bytes of text, about
    end: ReadPosition
    bytes_read: int  # of all input files so far, as they lie on the disk

    def documents(self) -> Iterator[RawDocument]:
        """Yield the records; blank lines of JSON files and empty pieces of separated text hold none."""
        if isinstance(self.payload, (bytes, bytearray)):
            payload, view = self.payload, memoryview(self.payload)
            position, begin, size = self.position, 0, len(payload)
            while begin < size:
                end = payload.find(b"\n", begin)
                end = size if end < 0 else end
                line = view[begin:end]  # not a copy
                if payload[begin] == _BRACE or (line and not bytes(line).isspace()):
                    yield RawDocument(self.file, position, line, is_json=True)
                position, begin = position + 1, end + 1
        else:
            for position, piece in enumerate(self.payload, start=self.position):
                if piece is not None:
                    yield RawDocument(self.file, position, piece, is_json=False)


@dataclass
class InputHashes:
    """Holds the SHA-256 and the size of every input file that has been read to its end, by the file's number."""

    of_files: dict[int, tuple[str, int]] = field(default_factory=dict)


def read_blocks(
    files: Sequence[InputFile],
    keys: Sequence[str],
    split_on: str | None = None,
    start: ReadPosition = ReadPosition(),
    hashes: InputHashes | None = None,
    needs_all_keys: bool = True,
) -> Iterator[Block]:
    """Cut files into blocks.

    Args:
        files: input files, as `find_files` returns them.
        keys: columns of parquet files to read.
        split_on: what stands between two documents of a .txt file; without it the file is one document.
        start: the `end` of an earlier block, to go on behind it.
        hashes: filled with the hashes of the files.
        needs_all_keys: whether a parquet file must have all of the columns, or any.

    Raises:
        DataError: a file is damaged, or a parquet file lacks a column.
        ConfigurationError: a package is missing for this kind of file.
    """
    before = sum(file.size() or 0 for file in files[: start.file])
    for number, file in enumerate(files[start.file :], start=start.file):
        begin = start if number == start.file else ReadPosition(number)
        with open_input(file) as (stream, hashing):
            if file.kind in ("parquet", "arrow"):
                yield from _row_blocks(file, keys, begin, before, needs_all_keys)
            else:
                cut = _cut_lines if file.kind == "json" else partial(_cut_text, split_on)
                cuts = cut(stream, begin, file.path)
                for payload, position, size, end in cuts:
                    yield Block(file.path, position, payload, size, end, before + hashing.bytes_read)
            digest = hashing.finish()
        before += hashing.bytes_read
        if hashes is not None:
            hashes.of_files[number] = (digest, hashing.bytes_read)


def read_documents(files: Sequence[InputFile], keys: Sequence[str] = ("text",)) -> Iterator[RawDocument]:
    """Yield all records of the files, in order."""
    return (record for block in read_blocks(files, keys) for record in block.documents())


_Cut = tuple[bytes | bytearray | list[bytes | None], int, int, ReadPosition]  # payload, position, size, end


def _row_blocks(
    file: InputFile, keys: Sequence[str], position: ReadPosition, bytes_before: int, needs_all_keys: bool
) -> Iterator[Block]:
    size, total = file.size() or 0, row_count(file)
    for rows, first, text_bytes in read_rows(file, keys, position.offset, needs_all_keys):
        behind = first + len(rows)
        end = ReadPosition(position.file, behind, behind + 1)
        # A parquet file is not read from front to back: its rows tell how far it is.
        share = size * behind // total if total else 0
        yield Block(file.path, first + 1, rows, text_bytes, end, bytes_before + share)


def _cut_lines(stream: BufferedIOBase, position: ReadPosition, path: str) -> Iterator[_Cut]:
    _skip(stream, position.offset)
    rest = b""  # the beginning of a line, whose end has not been read
    while True:
        lines = bytearray(len(rest) + BLOCK_BYTES)
        lines[: len(rest)] = rest
        read = stream.readinto(memoryview(lines)[len(rest) :])
        del lines[len(rest) + read :]
        whole = lines.rfind(b"\n", len(rest)) + 1
        is_one_line = whole == 0
        if is_one_line:  # the last line without an end, or a long line, which gets a block of its own
            lines += stream.readline(MOST_RECORD)
            if len(lines) > MOST_RECORD:
                raise _too_large(path, position, "line")
            whole = len(lines)
        rest = bytes(memoryview(lines)[whole:])
        del lines[whole:]
        if not lines:
            return
        # numpy counts 4 times as fast, but makes an array as long as the lines.
        count = lines.count(b"\n") if is_one_line else np.count_nonzero(np.frombuffer(lines, np.uint8) == _LINE_END)
        end = ReadPosition(position.file, position.offset + len(lines), position.position + int(count))
        cut = lines, position.position, len(lines), end
        del lines
        yield cut
        del cut
        position = end


def _cut_text(split_on: str | None, stream: BufferedIOBase, position: ReadPosition, path: str) -> Iterator[_Cut]:
    if not split_on:
        if position.position == 1:
            content = stream.read(MOST_RECORD + 1)
            if len(content) > MOST_RECORD:
                raise _too_large(path, position, "text")
            yield [content], 1, len(content), ReadPosition(position.file, len(content), 2)
        return
    separator = split_on.encode()
    _skip(stream, position.offset)
    pending, is_last = b"", False
    while not is_last:
        chunk = stream.read(BLOCK_BYTES)
        is_last = not chunk
        pieces = (pending + chunk).split(separator)
        pending = b"" if is_last else pieces.pop()
        if len(pending) > MOST_RECORD:
            raise _too_large(path, position, "text")
        size = sum(map(len, pieces)) + len(separator) * len(pieces)
        end = ReadPosition(position.file, position.offset + size, position.position + len(pieces))
        if pieces:
            yield [piece or None for piece in pieces], position.position, size, end
        position = end


def _too_large(path: str, at: ReadPosition, what: str) -> DataError:
    return DataError(
        f"{path}:{at.position}: a {what} of more than {MOST_RECORD:,} bytes, which is no document: it was not read; "
        "repair the file, or leave it out of --input"
    )


def _skip(stream: BufferedIOBase, offset: int) -> None:
    """Read on to an offset: what was hashed and decompressed before has to be so again."""
    while offset > 0:
        chunk = stream.read(min(offset, BLOCK_BYTES))
        if not chunk:
            return
        offset -= len(chunk)
