"""Trains a tokenizer on text files.

    megatron-ext train-tokenizer --input data/python_train.jsonl --output-dir data/tokenizer --vocab-size 8192

writes a folder for --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer (with --type sentencepiece-*:
tokenizer.model in it, for SentencePieceTokenizer). The same input always gives the same tokenizer.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.commandline import ToolParser
from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare.documents import RawDocument, read_documents
from megatron_ext.plugins.prepare.inputs import EXTENSIONS, find_files
from megatron_ext.plugins.prepare.tokenizer_training import (
    TRAINABLE_TYPES,
    sample_texts,
    train_bytelevel_bpe,
    train_sentencepiece,
)
from megatron_ext.terminal import note, say
from megatron_ext.tokenizer.tokenizer_protocol import Text, as_string


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Train a tokenizer on text files.", __doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, .json or .txt files, or folders of them")
    add("--extensions", nargs="+", default=[], metavar="ENDING", help=EXTENSIONS)
    add("--output-dir", required=True, help="folder of the tokenizer's files")
    add("--vocab-size", type=int, required=True, help="entries, special tokens included")
    add("--or-fewer", action="store_true", help="take fewer entries where the text has no more merges (hf-bpe)")
    add("--type", choices=TRAINABLE_TYPES, default="hf-bpe", help="kind of tokenizer")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys whose text is used")
    add("--max-bytes", type=int, metavar="N", help="train on about N bytes, a fixed sample of the documents")
    add(
        "--on-error",
        choices=("fail", "skip", "log"),
        default="fail",
        help="what to do with a bad document: stop and name it, leave it out, or also print a line for each",
    )
    options = parser.parse_args(argv)
    start = time.perf_counter()
    files = find_files(options.input, options.extensions, say)
    size = sum(file.size() or 0 for file in files)
    records = read_documents(files, options.json_keys)
    texts = (as_string(text) for record in records for text in _texts(record, options.json_keys, options.on_error))
    if options.max_bytes is not None and options.max_bytes < size:
        texts = sample_texts(texts, options.max_bytes / size)
    folder = Path(options.output_dir)
    say(f"training a {options.type} tokenizer of {options.vocab_size} entries, input {size / 1e6:.1f} MB")
    if options.type == "hf-bpe":
        train_bytelevel_bpe(texts, options.vocab_size, folder, or_fewer=options.or_fewer)
    else:
        train_sentencepiece(texts, options.vocab_size, folder, options.type.removeprefix("sentencepiece-"))
    say(f"wrote {folder} in {time.perf_counter() - start:.1f} s")
    return 0


def _texts(record: RawDocument, keys: Sequence[str], on_error: str) -> Sequence[Text]:
    """Return the texts of a document, as its method does; none of a bad one that may be left out."""
    try:
        return record.texts(keys)
    except DataError as error:
        if on_error == "fail":
            raise
        if on_error == "log":
            note(f"left out: {error}")
        return ()
