"""Turns text into the .bin/.idx files that training reads.

    megatron-ext preprocess --input corpus.jsonl --output-prefix data/corpus --append-eod --workers 8 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/

writes data/corpus_text_document.bin and .idx, which training takes as --data-path data/corpus_text_document, and
data/corpus_manifest.json, which says what they were made from. A run that was killed goes on when it is started again.
Exit codes: 0 done, 64 the flags cannot work, 65 a document cannot be read (file:line), 71 memory has
run out, 74 reading or writing failed.

Takes flags of Megatron-LM's preprocess_data.py that have no bearing here, or refuses them by name.

    add_old_flags(parser)
    options = parser.parse_args(argv)
    for warning in old_flags(options): ...
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator

from megatron_ext.commandline import ToolParser
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prepare.chat_templates import TEMPLATES
from megatron_ext.plugins.prepare.conversations import DATA_FORMATS
from megatron_ext.plugins.prepare.inputs import EXTENSIONS
from megatron_ext.plugins.prepare.journal import Progress
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from megatron_ext.plugins.prepare.tokenizer_flags import add_tokenizer_flags, tokenizer_values
from megatron_ext.terminal import bar, note, status, warn

_ORDER = "documents are written in the order of the input, whatever encodes them"
_SENTENCES = "documents are not split into sentences"

_TAKEN: dict[str, tuple[str | None, str]] = {
    "--partitions": ("N", "the output is one pair of files, and --workers says how many processes encode"),
    "--keep-sequential-samples": (None, _ORDER),
    "--keep-newlines": (None, _SENTENCES),
    "--lang": ("LANGUAGE", _SENTENCES),
    "--dataset-impl": ("KIND", "there is one format, .bin and .idx, which training reads"),
    "--chunk-size": ("N", "documents are handed to the processes by size"),
}
"""Flag that is accepted and changes nothing -> the placeholder of its value (None for a switch), and how the tool works
instead."""

_REFUSED: dict[str, tuple[str | None, str]] = {
    "--split-sentences": (None, f"{_SENTENCES}, which a GPT does not take; leave it out"),
    "--find-optimal-num-workers": (None, "no number of processes is searched for; use --workers"),
    "--workers-to-check": ("N ...", "no number of processes is searched for; use --workers"),
    "--max-documents": ("N", "no number of processes is searched for; use --workers"),
}


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags to a parser, whose help does not show them."""
    for flag, (value, _) in (_TAKEN | _REFUSED).items():
        if value is None:
            parser.add_argument(flag, action="store_true", default=None, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, nargs="+" if "..." in value else None, help=argparse.SUPPRESS)


def old_flags(options: argparse.Namespace) -> Iterator[str]:
    """Yield a warning for each given flag of Megatron-LM's tool that changes nothing.

    Raises:
        ConfigurationError: one is given that asks for other documents than are written.
    """
    refused = [f"{flag} is not supported: {why}" for flag, (_, why) in _REFUSED.items() if _is_given(options, flag)]
    if refused:
        raise ConfigurationError(refused)
    for flag, (_, instead) in _TAKEN.items():
        if _is_given(options, flag):
            yield f"{flag} changes nothing here: {instead}"


def _is_given(options: argparse.Namespace, flag: str) -> bool:
    return getattr(options, flag.removeprefix("--").replace("-", "_")) is not None


_INPUTS = (
    "files, folders or patterns of .jsonl (also .json), .txt, .parquet and .arrow; the first two also .gz, .zst, .xz "
    "or .bz2; a folder of the library datasets; a URL of these (s3://, gs://, hf://datasets/...); - is JSON lines from "
    "the standard input; of a folder, every other file that is text as well"
)


def make_parser() -> ToolParser:
    """Return the parser of the tool's command line."""
    parser = ToolParser("Encode text files into .bin/.idx, one pair for each JSON key.", __doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=_INPUTS)
    add("--extensions", nargs="+", default=[], metavar="ENDING", help=EXTENSIONS)
    add("--output-prefix", required=True, help="the files get this name plus _{key}_document.bin and .idx")
    add_tokenizer_flags(parser, required=True)
    add(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="keys whose text is encoded, by default text; of instruction data the one that holds the conversation",
    )
    add(
        "--data-format",
        choices=DATA_FORMATS,
        default="text",
        help="what a record is; all but text get a .mask file of what is trained on (--assistant-only-loss)",
    )
    add(
        "--chat-template",
        metavar="NAME",
        help=f"of alpaca, sharegpt and messages: {', '.join(TEMPLATES)}, tokenizer (its own), or a file of jinja; "
        "default alpaca for alpaca, else tokenizer",
    )
    add("--seq-length", type=int, metavar="N", help="pack whole conversations into sequences of this many tokens")
    add("--train-on-inputs", action="store_true", help="of a conversation, train on what the user says as well")
    add("--append-eod", action="store_true", help="end each document that is not empty with the end-of-document id")
    add("--split-on", metavar="TEXT", help="what stands between two documents of a .txt file")
    add("--workers", type=int, default=1, help="processes that encode; the output does not depend on it")
    add(
        "--on-error",
        choices=("fail", "skip", "log"),
        default="fail",
        help="what to do with a bad document: "
        "stop and name it, leave it out and count it, or also print a line for each",
    )
    add("--plain-tokenizer", action="store_true", help="do not look for a faster tokenizer that gives the same ids")
    add("--commit-interval", type=float, default=2.0, metavar="SECONDS", help="time between two notes of how far it is")
    add("--log-interval", type=int, default=1000, metavar="N", help="documents between two progress lines of a log")
    add_old_flags(parser)
    return parser


_EACH = 0.5  # seconds between two states of a terminal's bar


class _ProgressLine:
    """Prints the rate and the time left every `interval` documents, to the standard error output; in a terminal it
    shows a bar in the last line instead."""

    def __init__(self, interval: int):
        self._interval = interval
        self._start = time.perf_counter()
        self._begun: Progress | None = None  # what an earlier run had done, which is no merit of this one
        self._next = 0
        self._shown = self._start

    def __call__(self, progress: Progress) -> None:
        if self._begun is None:
            self._begun = progress
        elif sys.stdout.isatty():
            self._show(progress)
            return
        elif progress.documents >= self._next:
            self.print("processed", progress)
        else:
            return
        self._next = progress.documents - progress.documents % self._interval + self._interval

    def _show(self, progress: Progress) -> None:
        now = time.perf_counter()
        if now - self._shown >= _EACH:
            self._shown = now
            left = _time_left(self._begun or Progress(), progress, now - self._start)
            share = f"{bar(progress.bytes_read / progress.bytes_total)} " if progress.bytes_total else ""
            status(f"encoding {share}{progress.documents:,} documents, {progress.tokens:,} tokens{left}")

    def print(self, verb: str, progress: Progress) -> None:
        elapsed = time.perf_counter() - self._start
        begun = self._begun or Progress()
        documents = (progress.documents - begun.documents) / elapsed
        megabytes = (progress.text_bytes - begun.text_bytes) / 1e6 / elapsed
        plain = f", {progress.by_reference} texts by the plain tokenizer" if progress.by_reference else ""
        note(
            f"{verb} {progress.documents} documents, {progress.text_bytes / 1e6:.1f} MB, {progress.tokens} tokens"
            f"{plain}{f', {progress.skipped} left out' if progress.skipped else ''} "
            f"({documents:.0f} documents/s, {megabytes:.2f} MB/s{_time_left(begun, progress, elapsed)})"
        )


def _time_left(begun: Progress, progress: Progress, elapsed: float) -> str:
    read = progress.bytes_read - begun.bytes_read
    if progress.bytes_total is None or progress.bytes_read >= progress.bytes_total or read <= 0:
        return ""
    seconds = round((progress.bytes_total - progress.bytes_read) * elapsed / read)
    return f", {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    gc.freeze()  # what is imported by now stays: nothing to look through again and again, and workers share it
    parser = make_parser()
    options = parser.parse_args(argv)
    for warning in old_flags(options):
        warn(warning)
    if options.log_interval < 1:
        parser.error(f"--log-interval {options.log_interval} must be 1 or more")
    line = _ProgressLine(options.log_interval)
    job = EncodeJob(
        inputs=tuple(options.input),
        output_prefix=options.output_prefix,
        **tokenizer_values(options),
        extensions=tuple(options.extensions),
        json_keys=tuple(options.json_keys) if options.json_keys else None,
        data_format=options.data_format,
        chat_template=options.chat_template,
        seq_length=options.seq_length,
        train_on_inputs=options.train_on_inputs,
        append_eod=options.append_eod,
        split_on=options.split_on,
        workers=options.workers,
        on_error=options.on_error,
        fast_tokenizer=not options.plain_tokenizer,
        commit_interval=options.commit_interval,
    )
    line.print("done:", encode_files(job, line, note))
    return 0
