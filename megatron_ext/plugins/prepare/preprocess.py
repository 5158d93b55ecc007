"""Turns text files into .bin/.idx, one pair per JSON key, byte for byte what Megatron-LM's own tool writes.

Workers turn blocks of records into token bytes; the parent writes them in input order, so that the files do not depend
on the number of workers. Only a few blocks are in flight: memory does not grow with the corpus. Every few seconds the
parent notes how far it is; a run that was killed goes on from that position when it is started again.

    encode_files(EncodeJob(inputs=("corpus.jsonl",), output_prefix="data/corpus", tokenizer_type="ByteTokenizer"))
    -> data/corpus_text_document.bin, data/corpus_text_document.idx, data/corpus_manifest.json
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megatron_ext.config.schema import DataConfig
from megatron_ext.data.data_manifest import checksums
from megatron_ext.data.indexed import IndexedWriter, Written, token_dtype
from megatron_ext.durable import FULL
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.plugins.prepare.auto_tokenizer import read_otherwise
from megatron_ext.plugins.prepare.chat import chat_template, missing_tokens
from megatron_ext.plugins.prepare.conversations import ConversationFormat
from megatron_ext.plugins.prepare.documents import Block, read_blocks
from megatron_ext.plugins.prepare.encode import BlockEncoder, EncodedBlock, MakeBlock, OnError, Sample
from megatron_ext.plugins.prepare.encode_conversations import ConversationEncoder
from megatron_ext.plugins.prepare.encode_many import fast_encoder, first_difference, plain_encoder
from megatron_ext.plugins.prepare.inputs import InputFile, find_files
from megatron_ext.plugins.prepare.journal import Journal, Progress, write_manifest
from megatron_ext.plugins.prepare.tokenizer_flags import tokenizer_values
from megatron_ext.tokenizer.from_flags import tokenizer_from_flags
from megatron_ext.tokenizer.probe_texts import probe_texts
from megatron_ext.tokenizer.tokenizer_protocol import BatchEncoder, Tokenizer, beginning
from megatron_ext.tokenizer.tokenizer_record import tokenizer_record

_FIRST_SAMPLE_CHARACTERS = 1 << 16
_SECOND_SAMPLE_TEXTS = 64
_MOST_WORKERS = 8  # for each core; one would do, but a machine's cores may be counted wrongly in a container


@dataclass(frozen=True)
class EncodeJob:
    """States what to encode and how; the fields are the flags of `megatron-ext preprocess`."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_special_tokens: tuple[str, ...] | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    extensions: tuple[str, ...] = ()
    json_keys: tuple[str, ...] | None = None
    data_format: str = "text"
    chat_template: str | None = None
    seq_length: int | None = None
    train_on_inputs: bool = False
    append_eod: bool = False
    split_on: str | None = None
    workers: int = 1
    on_error: OnError = "fail"
    fast_tokenizer: bool = True
    commit_interval: float = 2.0  # seconds

    @property
    def is_text(self) -> bool:
        """Whether the documents are plain text, and not instruction data."""
        return self.data_format == "text"

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the pairs that are written: the JSON keys of text, else the format."""
        return (self.json_keys or ("text",)) if self.is_text else (self.data_format,)

    @property
    def packed_to(self) -> int | None:
        """The argument of IndexedWriter: None for text, which has no mask."""
        return None if self.is_text else self.seq_length or 0

    def output(self, key: str) -> str:
        """Return the prefix of the pair of one key."""
        return f"{self.output_prefix}_{key}_document"


def encode_files(
    job: EncodeJob,
    report: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> Progress:
    """Run the job.

    Args:
        job: what to do. If an earlier run of the same job was killed, this one goes on where that one stopped.
        report: called at the beginning and after each block.
        note: called with messages for the user: which encoder runs, and records that were left out.

    Raises:
        ConfigurationError: a flag cannot work.
        DataError: a document cannot be read or encoded; the text names file and line.
    """
    if job.workers < 1:
        raise ConfigurationError(f"--workers {job.workers} must be 1 or more")
    cores = len(os.sched_getaffinity(0))
    if job.workers > _MOST_WORKERS * cores:
        note(f"--workers {job.workers}: {_MOST_WORKERS * cores} are used, {_MOST_WORKERS} for each core here")
        job = replace(job, workers=_MOST_WORKERS * cores)
    _check_format(job)
    folder = Path(job.output_prefix).parent
    if not folder.is_dir():
        raise ConfigurationError(f"--output-prefix {job.output_prefix}: the folder {folder} does not exist; make it")
    files = find_files(job.inputs, job.extensions, note)
    tokenizer = _tokenizer_of(job)
    for words in read_otherwise(tokenizer):
        note(f"warning: --tokenizer-model {job.tokenizer_model}: {words}")
    try:
        return _Run(job, files, tokenizer, note).encode(report)
    except _Differs as error:
        note(f"the fast tokenizer differs from {job.tokenizer_type} on {error.text!r}: all again without it")
        return _Run(replace(job, fast_tokenizer=False), files, tokenizer, note).encode(report)


class _Differs(Exception):
    """Raised where the second sample shows that the fast encoder cannot be used."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


class _Run:
    """One pass over the inputs, from the beginning or from where the journal says."""

    def __init__(self, job: EncodeJob, files: Sequence[InputFile], tokenizer: Tokenizer, note: Callable[[str], None]):
        self._job = job
        self._files = files
        self._tokenizer = tokenizer
        self._note = note
        self._reference = plain_encoder(tokenizer)
        self._is_fast = False
        self._journal_path = Path(f"{job.output_prefix}.partial.json")
        self._can_continue = not any(file.is_standard_input for file in files)
        self._journal = self._find_journal()
        dtype = token_dtype(tokenizer.vocab_size)
        starts = zip(job.keys, self._journal.written, strict=True)
        self._writers = [IndexedWriter(job.output(key), dtype, written, job.packed_to) for key, written in starts]

    def encode(self, report: Callable[[Progress], None]) -> Progress:
        report(self._journal.progress)
        try:
            self._encode_all(report)
            self._check_second_sample()
            if self._journal.progress.tokens == 0:
                raise DataError(
                    f"--input {' '.join(self._job.inputs)}: {self._journal.progress.documents} documents and not one "
                    "token in them"
                )
        except _Differs:
            self._discard()
            raise
        except BaseException:
            # The next run can use the tokens that the journal covers; the others are lost in any case.
            if self._journal_path.exists():
                for writer in self._writers:
                    writer.close()
            else:
                self._discard()
            raise
        for writer in self._writers:
            writer.finish()
        self._write_manifest()
        self._journal_path.unlink(missing_ok=True)
        return self._journal.progress

    def _find_journal(self) -> Journal:
        job = self._job
        identity = {
            "inputs": [file.state() for file in self._files],
            "tokenizer": self._tokenizer.identity(),
            "json_keys": list(job.json_keys or job.keys),
            "append_eod": job.append_eod,
            "split_on": job.split_on,
            **_format_identity(job, self._tokenizer),
        }
        sizes = [file.size() for file in self._files]
        total = None if None in sizes else sum(size for size in sizes if size)
        fresh = Journal(job=identity, progress=Progress(bytes_total=total), written=[Written() for _ in job.keys])
        earlier = Journal.load(self._journal_path) if self._can_continue else None
        if earlier is not None:
            outputs = zip(job.keys, earlier.written, strict=False)
            itemsize = None if job.is_text else token_dtype(self._tokenizer.vocab_size)().itemsize
            is_there = all(IndexedWriter.holds(job.output(key), done, itemsize) for key, done in outputs)
            if earlier.job == identity and is_there:
                self._note(f"going on behind {earlier.progress.documents} documents that an earlier run encoded")
                return earlier
            self._note(f"{self._journal_path} is of other inputs or flags: starting from the beginning")
        self._journal_path.unlink(missing_ok=True)
        return fresh

    def _encode_all(self, report: Callable[[Progress], None]) -> None:
        job, journal = self._job, self._journal
        columns = job.keys if job.is_text else conversation_format(job, self._tokenizer).columns
        blocks = read_blocks(self._files, columns, job.split_on, journal.position, journal.hashes, job.is_text)
        first = next(blocks, None)
        if first is None:
            return
        encoder = self._block_encoder(first)
        blocks = _behind([first], blocks)
        del first  # it can be a document of 100 MB
        if job.workers == 1:
            encoded_blocks = map(encoder, blocks)
        else:
            from megatron_ext.plugins.prepare.encode import (
                encode_in_processes,  # multiprocessing takes a while to import
            )

            locked = [descriptor for writer in self._writers for descriptor in writer.descriptors()]
            start = partial(_start_worker, job, self._is_fast)
            encoded_blocks = encode_in_processes(job.workers, encoder, start, locked, blocks)
        committed = time.monotonic()
        for encoded in encoded_blocks:
            self._add(encoded)
            report(journal.progress)
            if self._can_continue and time.monotonic() - committed >= job.commit_interval:
                journal.written = [writer.commit() for writer in self._writers]
                journal.save(self._journal_path)
                committed = time.monotonic()

    def _block_encoder(self, first: Block) -> MakeBlock:
        job = self._job
        if job.is_text:
            return BlockEncoder(self._tokenizer, self._choose_encoder(first), job.keys, job.append_eod, job.on_error)
        for token in missing_tokens(job.chat_template or "", self._tokenizer):
            self._note(
                f"warning: {token} of --chat-template {job.chat_template} is no token of this tokenizer: its "
                "characters are encoded"
            )
        return _conversation_encoder(job, self._tokenizer)

    def _add(self, encoded: EncodedBlock) -> None:
        journal = self._journal
        with self._saying_what_is_needed(encoded):
            for writer, (tokens, lengths) in zip(self._writers, encoded.columns, strict=True):
                writer.add_tokens(tokens.data, lengths, encoded.flags)
        if self._job.on_error == "log":
            for problem in encoded.problems:
                self._note(f"left out: {problem}")
        done = journal.progress
        journal.progress = Progress(
            documents=done.documents + encoded.documents,
            skipped=done.skipped + len(encoded.problems),
            text_bytes=done.text_bytes + encoded.text_bytes,
            tokens=done.tokens + sum(int(lengths.sum()) for _, lengths in encoded.columns),
            bytes_read=encoded.bytes_read,
            bytes_total=done.bytes_total,
            by_reference=done.by_reference + encoded.by_reference,
        )
        journal.position = encoded.end
        if self._is_fast and encoded.sample is not None:
            _spread(journal.samples, journal.blocks, encoded.sample)
        journal.blocks += 1

    @contextmanager
    def _saying_what_is_needed(self, encoded: EncodedBlock) -> Iterator[None]:
        """Raise a StorageError where a full disk has no room for a block: with an estimate of all tokens' bytes."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            progress, block = self._journal.progress, sum(tokens.nbytes for tokens, _ in encoded.columns)
            written = sum(writer.written.token_bytes for writer in self._writers) + block
            total = progress.bytes_total or encoded.bytes_read
            about = written * max(total, encoded.bytes_read) // max(encoded.bytes_read, 1)
            kept = "; it then goes on where it stopped" if self._journal_path.exists() else ""
            raise StorageError(
                f"{error.filename} cannot be written: {error.strerror}. The tokens need about {about:,} bytes in all. "
                f"Free space, or give another --output-prefix, and start again{kept}."
            ) from error

    def _choose_encoder(self, first: Block) -> BatchEncoder:
        """Return the fast encoder, if there is one and it gives the reference's ids on probes and on the first
        block."""
        if not self._job.fast_tokenizer:
            return self._reference
        try:
            fast = fast_encoder(self._tokenizer)
        except ValueError as error:
            self._note(f"no fast tokenizer: {error}")
            return self._reference
        texts = probe_texts(self._tokenizer) + _first_sample(first, self._job.keys)
        different = first_difference(fast, self._reference, texts)
        if different is not None:
            kind = self._job.tokenizer_type
            self._note(f"no fast tokenizer: it differs from {kind} on {different[:200]!r}")
            return self._reference
        self._note(f"fast tokenizer: equal on {len(texts)} texts; a second sample is compared at the end")
        self._is_fast = True
        return fast

    def _check_second_sample(self) -> None:
        for _, sample in self._journal.samples:
            if self._reference([sample.text])[0].tolist() != sample.ids:
                raise _Differs(sample.text[:200])

    def _discard(self) -> None:
        self._journal_path.unlink(missing_ok=True)
        for writer in self._writers:
            writer.discard()

    def _write_manifest(self) -> None:
        progress, hashes = self._journal.progress, self._journal.hashes.of_files
        write_manifest(
            Path(f"{self._job.output_prefix}_manifest.json"),
            {
                "inputs": [
                    {"path": file.path, "bytes": hashes[number][1], "sha256": hashes[number][0]}
                    for number, file in enumerate(self._files)
                ],
                "tokenizer": tokenizer_record(self._tokenizer),
                "append_eod": self._job.append_eod,
                "split_on": self._job.split_on,
                **_format_identity(self._job, self._tokenizer),
                "documents": progress.documents,
                "skipped": progress.skipped,
                "tokens": progress.tokens,
                "outputs": {
                    self._job.output(key): asdict(writer.written)
                    for key, writer in zip(self._job.keys, self._writers, strict=True)
                },
                "checksums": checksums([self._job.output(key) for key in self._job.keys]),
            },
        )


def _check_format(job: EncodeJob) -> None:
    """Refuse flags that the format of the documents does not read."""
    values = {"--chat-template": job.chat_template, "--seq-length": job.seq_length}
    if job.is_text or job.data_format == "completion":
        unread = ["--chat-template"] if job.data_format == "completion" else [*values, "--train-on-inputs"]
        values["--train-on-inputs"] = job.train_on_inputs or None
        for flag in unread:
            if values[flag] is not None:
                raise ConfigurationError(
                    f"{flag} is not read by --data-format {job.data_format}; leave it out, or give --data-format "
                    "alpaca, sharegpt or messages"
                )
    if job.seq_length is not None and job.seq_length < 2:
        raise ConfigurationError(f"--seq-length {job.seq_length} must be 2 or more")
    if not job.is_text and len(job.json_keys or ()) > 1:
        raise ConfigurationError(f"--data-format {job.data_format} reads one column; give one name to --json-keys")
    if job.data_format == "alpaca" and job.json_keys:
        raise ConfigurationError("--data-format alpaca reads instruction, input and output; leave out --json-keys")


def _format_identity(job: EncodeJob, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the settings, besides the tokens, that a loss mask depends on; empty for text."""
    if job.is_text:
        return {}
    form = conversation_format(job, tokenizer)
    template = None if form.template is None else form.template.digest
    return {
        "data_format": job.data_format,
        "chat_template_sha256": template,
        "seq_length": job.seq_length,
        "train_on_inputs": job.train_on_inputs,
    }


def conversation_format(job: EncodeJob, tokenizer: Tokenizer) -> ConversationFormat:
    """Return how a record of instruction data becomes text. Raises ConfigurationError where a template is missing."""
    choice = job.chat_template or ("alpaca" if job.data_format == "alpaca" else "tokenizer")
    template = None if job.data_format == "completion" else chat_template(choice, tokenizer)
    return ConversationFormat(job.data_format, (job.json_keys or (None,))[0], template)


def _conversation_encoder(job: EncodeJob, tokenizer: Tokenizer) -> ConversationEncoder:
    form = conversation_format(job, tokenizer)
    return ConversationEncoder(tokenizer, form, job.append_eod, job.on_error, job.seq_length or 0, job.train_on_inputs)


def _tokenizer_of(job: EncodeJob) -> Tokenizer:
    return tokenizer_from_flags(DataConfig(**tokenizer_values(job)))


def _start_worker(job: EncodeJob, is_fast: bool) -> MakeBlock:
    tokenizer = _tokenizer_of(job)
    if not job.is_text:
        return _conversation_encoder(job, tokenizer)
    encoder = fast_encoder(tokenizer) if is_fast else plain_encoder(tokenizer)
    return BlockEncoder(tokenizer, encoder, job.keys, job.append_eod, job.on_error)


def _first_sample(block: Block, keys: Sequence[str]) -> list[str]:
    texts: list[str] = []
    left = _FIRST_SAMPLE_CHARACTERS
    for record in block.documents():
        try:
            of_keys = record.texts(keys)
        except DataError:
            continue
        for text in of_keys:
            texts.append(beginning(text, left))
            left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def _spread(samples: list[tuple[int, Sample]], number: int, sample: Sample) -> None:
    """Keep the samples of every n-th block, n a power of two that grows with the input: evenly over all of it."""
    stride = 1
    while number // stride >= _SECOND_SAMPLE_TEXTS:
        stride *= 2
    if number % stride == 0:
        samples[:] = [kept for kept in samples if kept[0] % stride == 0]
        samples.append((number, sample))


def _behind(first: list[Block], blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the one block of the list, of which nothing is kept, and then the others."""
    yield first.pop()
    yield from blocks
