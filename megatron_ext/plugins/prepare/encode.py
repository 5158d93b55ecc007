"""Encodes blocks of records to the bytes of a .bin file, in order, in this process or in several.

All processes together must fit in memory: few blocks are in flight, long documents stay here, and the workers are
forked where that is safe, so that they share the tokenizer's tables and start at once.
"""

import multiprocessing
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import numpy as np

from megatron_ext.data.indexed import token_dtype
from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare.documents import Block, ReadPosition
from megatron_ext.plugins.prepare.guarded_encoder import Guarded
from megatron_ext.tokenizer.tokenizer_protocol import BatchEncoder, Text, Tokenizer, beginning

OnError = Literal["fail", "skip", "log"]
_SAMPLE_CHARACTERS = 1024
_LONG_DOCUMENT = 256  # tokens from which on copying documents one by one is the faster way


@dataclass(frozen=True)
class Sample:
    """A text of the input, or the beginning of one, and the ids that were written for it."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of one block: for each key the tokens of all, and the number of tokens of each."""

    end: ReadPosition
    bytes_read: int
    text_bytes: int
    documents: int
    problems: list[str]  # one for each document that is left out
    columns: list[tuple[np.ndarray, np.ndarray]]
    sample: Sample | None
    by_reference: int = 0
    """Number of texts that the fast encoder left to the reference."""
    flags: np.ndarray | None = None
    """Of instruction data, whose documents are one column: flags of its tokens, as `megatron_ext.data.mask` says."""


type MakeBlock = Callable[[Block], EncodedBlock]
"""Encodes a block: `BlockEncoder`, or `ConversationEncoder` for conversations."""


class BlockEncoder:
    """Parses and encodes blocks.

    Args:
        tokenizer: gives the vocabulary's size and the end of a document.
        encoder: encodes texts as this tokenizer does.
        keys: JSON keys, or columns, to encode.
        append_eod: end every document that has tokens with the end-of-document id.
        on_error: what to do with a document that cannot be read or encoded: raise DataError, or leave it out.
    """

    def __init__(
        self, tokenizer: Tokenizer, encoder: BatchEncoder, keys: Sequence[str], append_eod: bool, on_error: OnError
    ):
        self._vocab_size = tokenizer.vocab_size
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._eod = tokenizer.eod if append_eod else None
        self._encoder = encoder
        self._keys = keys
        self._on_error = on_error

    def __call__(self, block: Block) -> EncodedBlock:
        positions, rows, problems = self._parse(block)
        try:
            columns, by_reference = self._encode_rows(rows)
        except _REFUSALS:
            named = zip(positions, rows, strict=True)
            rows = [texts for position, texts in named if self._accepts(block.file, position, texts, problems)]
            columns, by_reference = self._encode_rows(rows)
        problems.sort(key=lambda problem: problem[0])
        if problems and self._on_error == "fail":
            raise problems[0][1]
        return EncodedBlock(
            end=block.end,
            bytes_read=block.bytes_read,
            text_bytes=block.size,
            documents=len(rows),
            problems=[str(error) for _, error in problems],
            columns=[self._finish(ids, lengths) for ids, lengths in columns],
            sample=self._sample(block, rows, columns),
            by_reference=by_reference,
        )

    def _parse(self, block: Block) -> tuple[list[int], list[list[Text]], list[tuple[int, DataError]]]:
        """Return the position and texts of each document that can be read, and the errors of the others."""
        positions: list[int] = []
        rows: list[list[Text]] = []
        problems: list[tuple[int, DataError]] = []
        for record in block.documents():
            try:
                rows.append(record.texts(self._keys))
                positions.append(record.position)
            except DataError as error:
                problems.append((record.position, error))
        return positions, rows, problems

    def _encode_rows(self, rows: list[list[Text]]) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
        """Return the ids under each key, and the number of texts that the reference encoded for the fast encoder."""
        columns, by_reference = [], 0
        for column in range(len(self._keys)):
            columns.append(self._encode([row[column] for row in rows]))
            by_reference += self._encoder.by_reference if isinstance(self._encoder, Guarded) else 0
        return columns, by_reference

    def _encode(self, texts: list[Text]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._encoder(texts)
        if len(ids) and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < self._vocab_size:
            raise _OutOfRange(f"token ids from {low} to {high} do not fit a vocabulary of {self._vocab_size}")
        return ids, lengths

    def _accepts(self, file: str, position: int, texts: list[Text], problems: list[tuple[int, DataError]]) -> bool:
        try:
            self._encode_rows([texts])
        except _OutOfRange as error:
            problems.append((position, DataError(f"{file}:{position}: {error}")))
        except _REFUSALS as error:  # a lone surrogate, or for NullTokenizer a word that is no number
            reason = _surrogate(texts) or error
            problems.append((position, DataError(f"{file}:{position}: the text cannot be encoded: {reason}")))
        else:
            return True
        return False

    def _finish(self, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._eod is None:
            return ids.astype(self._dtype), lengths
        # As Megatron's tool: an empty document gets no end of document either.
        not_empty = lengths > 0
        ended_lengths = lengths + not_empty
        ends = np.cumsum(lengths)[not_empty]
        if len(ids) < _LONG_DOCUMENT * len(ends):
            return np.insert(ids.astype(self._dtype), ends, self._eod), ended_lengths
        # The same, but without a pass over the ids for the dtype, a pass for the places, and two copies.
        ended = np.empty(len(ids) + len(ends), self._dtype)
        ended[ends + np.arange(len(ends))] = self._eod
        begin = 0
        for number, end in enumerate(ends.tolist()):
            ended[begin + number : end + number] = ids[begin:end]
            begin = end
        return ended, ended_lengths

    def _sample(
        self, block: Block, rows: list[list[Text]], columns: list[tuple[np.ndarray, np.ndarray]]
    ) -> Sample | None:
        if not rows:
            return None
        choice = zlib.crc32(f"{block.file}:{block.position}".encode())
        row, column = choice % len(rows), choice % len(self._keys)
        text = rows[row][column]
        if isinstance(text, bytes) or len(text) > _SAMPLE_CHARACTERS:
            text = beginning(text, _SAMPLE_CHARACTERS)
            return Sample(text, self._encoder([text])[0].tolist())
        ids, lengths = columns[column]
        end = int(lengths[: row + 1].sum())
        return Sample(text, ids[end - int(lengths[row]) : end].tolist())


class _OutOfRange(ValueError):
    pass


_REFUSALS = (ValueError, TypeError, OverflowError)


def _surrogate(texts: Sequence[Text]) -> UnicodeEncodeError | None:
    """Return the error that a lone surrogate is, in Python's words, which say where it stands."""
    for text in texts:
        if isinstance(text, bytes):
            continue
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return error
    return None


_IN_FLIGHT_BYTES = 1 << 25
_LONG_BLOCK = 1 << 23


def encode_in_processes(
    workers: int,
    encoder: MakeBlock,
    start: Callable[[], MakeBlock],
    locked: Sequence[int],
    blocks: Iterable[Block],
) -> Iterator[EncodedBlock]:
    """Encode in up to `workers` processes; results come in the order of the blocks, at most 3 a worker in flight.

    Args:
        workers: number of processes, where there are so many blocks.
        encoder: the encoder of this process. It also takes blocks of over 8 MB, which are one long document: sending it
            to a worker would make four copies of it.
        start: makes the encoder of a worker that is not forked; can be pickled.
        locked: file descriptors that a forked worker must not keep open, because they hold a lock.
        blocks: the input.
    """
    blocks, ahead = iter(blocks), deque[Block]()
    for block in islice(blocks, workers):
        ahead.append(block)
        if sum(one.size for one in ahead) > _IN_FLIGHT_BYTES:
            break
    else:
        workers = len(ahead)
    # A forked child inherits the locks of other threads as they stand.
    if threading.active_count() == 1:
        fork = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(workers, fork, initializer=_adopt, initargs=(encoder, tuple(locked)))
    else:
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(start,))
    try:
        waiting: deque[tuple[int, Future[EncodedBlock]]] = deque()
        for block in chain(_taken(ahead), blocks):
            if block.size > _LONG_BLOCK:
                while waiting:
                    yield waiting.popleft()[1].result()
                yield encoder(block)
                continue
            waiting.append((block.size, pool.submit(_encode, block)))
            while len(waiting) >= 3 * workers or sum(size for size, _ in waiting) > _IN_FLIGHT_BYTES:
                yield waiting.popleft()[1].result()
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _taken(blocks: deque[Block]) -> Iterator[Block]:
    """Yield the blocks and keep none, which can be large."""
    while blocks:
        yield blocks.popleft()


_encoder: MakeBlock | None = None


def _adopt(encoder: MakeBlock, locked: Sequence[int]) -> None:
    """Begin a forked worker."""
    for descriptor in locked:
        os.close(descriptor)
    _begin(lambda: encoder)


def _begin(start: Callable[[], MakeBlock]) -> None:
    global _encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next block for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    assert _encoder is not None
    return _encoder(block)
