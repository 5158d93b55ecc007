"""Text to the .bin/.idx files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod --workers 8 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/

writes data/corpus_text_document.bin and .idx, which training takes as --data-path data/corpus_text_document.
Exit codes: 0 done, 64 the flags cannot work, 65 a document cannot be read (file:line), 74 reading or writing failed.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.data.preprocess import EncodeJob, Progress, encode_files
from megatron_ext.tokenizer.build import TOKENIZER_TYPES


def make_parser() -> ToolParser:
    parser = ToolParser("Encode text files into .bin/.idx, one pair for each JSON key.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, .json or .txt files, or folders of them")
    add("--output-prefix", required=True, help="the files get this name plus _{key}_document.bin and .idx")
    add("--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="tokenizer")
    add("--tokenizer-model", help="the tokenizer's file, or its folder for HuggingFaceTokenizer")
    add("--vocab-size", type=int, help="number of ids, for NullTokenizer alone")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys whose text is encoded")
    add("--append-eod", action="store_true", help="end each document that is not empty with the end-of-document id")
    add("--split-on", metavar="TEXT", help="what stands between two documents of a .txt file")
    add("--workers", type=int, default=1, help="processes that encode; the output does not depend on it")
    add("--log-interval", type=int, default=1000, metavar="N", help="documents between two progress lines")
    return parser


class _ProgressLine:
    """Prints the rate every `interval` documents, to the standard error output."""

    def __init__(self, interval: int):
        self._interval = interval
        self._start = time.perf_counter()
        self._next = interval

    def __call__(self, progress: Progress) -> None:
        if progress.documents >= self._next:
            self._next = progress.documents - progress.documents % self._interval + self._interval
            self.print("processed", progress)

    def print(self, verb: str, progress: Progress) -> None:
        elapsed = time.perf_counter() - self._start
        megabytes = progress.text_bytes / 1e6
        print(
            f"{verb} {progress.documents} documents, {megabytes:.1f} MB, {progress.tokens} tokens "
            f"({progress.documents / elapsed:.0f} documents/s, {megabytes / elapsed:.2f} MB/s)",
            file=sys.stderr,
            flush=True,
        )


def main(argv: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.log_interval < 1:
        parser.error(f"--log-interval {options.log_interval} must be 1 or more")
    line = _ProgressLine(options.log_interval)
    job = EncodeJob(
        inputs=tuple(options.input),
        output_prefix=options.output_prefix,
        tokenizer_type=options.tokenizer_type,
        tokenizer_model=options.tokenizer_model,
        vocab_size=options.vocab_size,
        json_keys=tuple(options.json_keys),
        append_eod=options.append_eod,
        split_on=options.split_on,
        workers=options.workers,
    )
    line.print("done:", encode_files(job, line))
    return 0


if __name__ == "__main__":
    run_tool(main)
