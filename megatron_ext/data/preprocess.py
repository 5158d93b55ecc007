"""Text files to .bin/.idx, one pair per JSON key, byte for byte what Megatron-LM's own tool writes.

Workers turn chunks of records into token bytes; the parent writes them in input order, so that the files do not
depend on the number of workers. Only a few chunks are in flight: memory does not grow with the corpus.

    encode_files(EncodeJob(inputs=("corpus.jsonl",), output_prefix="data/corpus", tokenizer_type="ByteTokenizer"))
    -> data/corpus_text_document.bin, data/corpus_text_document.idx
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.data.documents import Record, find_files, read_records
from megatron_ext.data.indexed import IndexedWriter, token_dtype
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.tokenizer.build import build_tokenizer
from megatron_ext.tokenizer.protocol import Tokenizer

_CHUNK_BYTES = 1 << 18
_CHUNK_RECORDS = 64


@dataclass(frozen=True)
class EncodeJob:
    """What to encode and how; the fields are the flags of tools/preprocess_data.py."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_on: str | None = None
    workers: int = 1


@dataclass(frozen=True)
class Progress:
    """Totals so far."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _Encoded:
    """One chunk of documents: for each key the token bytes and the tokens of each document."""

    text_bytes: int
    documents: int
    columns: list[tuple[bytes, list[int]]]


def encode_files(job: EncodeJob, report: Callable[[Progress], None] = lambda progress: None) -> Progress:
    """Run the job; `report` is called after each chunk.

    Raises:
        ConfigurationError: a flag cannot work.
        DataError: a document cannot be read or encoded; the text names file and line.
    """
    if job.workers < 1:
        raise ConfigurationError(f"--workers {job.workers} must be 1 or more")
    files = find_files(job.inputs)
    folder = Path(job.output_prefix).parent
    if not folder.is_dir():
        raise ConfigurationError(f"--output-prefix {job.output_prefix}: the folder {folder} does not exist; make it")
    encoder = _Encoder(job)
    dtype = token_dtype(encoder.tokenizer.vocab_size)
    progress = Progress()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(f"{job.output_prefix}_{key}_document", dtype)) for key in job.json_keys
        ]
        chunks = _chunks(read_records(files, job.split_on))
        encoded_chunks = map(encoder, chunks) if job.workers == 1 else _encode_in_processes(job, chunks)
        for encoded in encoded_chunks:
            for writer, (tokens, lengths) in zip(writers, encoded.columns, strict=True):
                writer.add_tokens(tokens, lengths)
            progress = Progress(
                progress.documents + encoded.documents,
                progress.text_bytes + encoded.text_bytes,
                progress.tokens + sum(sum(lengths) for _, lengths in encoded.columns),
            )
            report(progress)
        if progress.tokens == 0:
            raise DataError(f"--input {' '.join(job.inputs)}: {progress.documents} documents and not one token in them")
    return progress


class _Encoder:
    def __init__(self, job: EncodeJob):
        self.tokenizer: Tokenizer = build_tokenizer(job.tokenizer_type, job.tokenizer_model, job.vocab_size)
        self._keys = job.json_keys
        self._dtype = token_dtype(self.tokenizer.vocab_size)
        self._tail = [self.tokenizer.eod] if job.append_eod else []

    def __call__(self, records: list[Record]) -> _Encoded:
        ids: list[list[int]] = [[] for _ in self._keys]
        lengths: list[list[int]] = [[] for _ in self._keys]
        for record in records:
            for column, text in enumerate(record.texts(self._keys)):
                document = self._encode(record, text)
                # As Megatron's tool: an empty document gets no end of document either.
                if document:
                    document += self._tail
                ids[column] += document
                lengths[column].append(len(document))
        columns = [
            (np.asarray(column, dtype=self._dtype).tobytes(), sizes) for column, sizes in zip(ids, lengths, strict=True)
        ]
        return _Encoded(sum(len(record.payload) for record in records), len(records), columns)

    def _encode(self, record: Record, text: str) -> list[int]:
        try:
            ids = self.tokenizer.encode(text)
        except (ValueError, TypeError) as error:  # a lone surrogate, or for NullTokenizer a word that is no number
            raise DataError(f"{record.where}: the text cannot be encoded: {error}") from error
        if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
            raise DataError(
                f"{record.where}: token ids from {min(ids)} to {max(ids)} do not fit a vocabulary of "
                f"{self.tokenizer.vocab_size}"
            )
        return ids


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record.payload)
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_RECORDS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


_worker_encoder: _Encoder | None = None


def _start_worker(job: EncodeJob) -> None:
    global _worker_encoder
    _worker_encoder = _Encoder(job)


def _encode_in_worker(records: list[Record]) -> _Encoded:
    assert _worker_encoder is not None
    return _worker_encoder(records)


def _encode_in_processes(job: EncodeJob, chunks: Iterable[list[Record]]) -> Iterator[_Encoded]:
    """Encode chunks in `job.workers` processes; results in the order of the chunks, at most 3 a worker in flight."""
    # spawn: the parent may hold threads of the tokenizer library, which a forked child would inherit locked.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(job.workers, mp_context=context, initializer=_start_worker, initargs=(job,))
    try:
        waiting: deque[Future[_Encoded]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= 3 * job.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
