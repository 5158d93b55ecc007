"""Look into a .bin/.idx pair, or prove that it is whole; or show what a training step read.

    megatron-ext inspect-dataset show data/corpus_text_document
    megatron-ext inspect-dataset document data/corpus_text_document 17 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/
    megatron-ext inspect-dataset verify data/corpus_text_document --vocab-size 32000
    megatron-ext inspect-dataset sample --step 1000 --config checkpoints/iter_0001000/config.yaml

`show` reads the index (--html FILE: as a page, too), `verify` checks it against the data and, with --vocab-size, reads
every token. `sample` takes the flags of the training, and shows the text of the samples that a step uses, or of one
sample by its position.
Exit codes: 0 done, 64 the flags cannot work, 65 the pair is damaged or holds a token outside the vocabulary.

What is in a .bin/.idx pair: counts, lengths, the tokens of one document, and a sample as text.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.config.schema.data_flags import DataConfig
from megatron_ext.data.data_manifest import first_damage, judge, known_blocks, made_with
from megatron_ext.data.integrity import check_indexed_files, check_token_ids, open_index, token_count
from megatron_ext.data.mask import Mask
from megatron_ext.data.stored import exists, open_bin
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.pages import charts
from megatron_ext.plugins.prepare.tokenizer_flags import add_tokenizer_flags, tokenizer_values
from megatron_ext.terminal import in_colour, printable, say, warn
from megatron_ext.tokenizer.from_flags import tokenizer_from_flags
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.tokenizer.tokenizer_record import describe_tokenizer
from megatron_ext.train.configure import configure

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Summary:
    """The counts of a pair. `histogram[k]` is the number of sequences with 2^k to 2^(k+1) - 1 tokens."""

    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    shortest: int
    longest: int
    histogram: list[int]


def summarize(prefix: str) -> Summary:
    """Read the whole index. Raises as `check_indexed_files` does."""
    check_indexed_files(prefix)
    index = open_index(prefix)
    histogram = np.zeros(32, np.int64)
    tokens = 0
    for first in range(0, len(index.lengths), _BLOCK):
        lengths = index.lengths[first : first + _BLOCK]
        tokens += int(lengths.sum(dtype=np.int64))
        # frexp gives the exponent of 2 exactly, where a logarithm would round.
        histogram += np.bincount(np.frexp(lengths[lengths > 0])[1] - 1, minlength=32)
    empty = sum(
        int((np.diff(index.document_indices[first : first + _BLOCK + 1]) == 0).sum())
        for first in range(0, len(index.document_indices) - 1, _BLOCK)
    )
    return Summary(
        dtype=str(index.dtype),
        documents=len(index.document_indices) - 1,
        empty_documents=empty,
        sequences=len(index.lengths),
        tokens=tokens,
        shortest=int(index.lengths.min()),
        longest=int(index.lengths.max()),
        histogram=histogram[: int(np.flatnonzero(histogram)[-1]) + 1].tolist() if histogram.any() else [],
    )


def document_tokens(prefix: str, document: int) -> list[int]:
    """Return the token ids of document number `document`, from 0.

    Raises:
        ConfigurationError: there is no such document, or a file is missing.
        DataError: the pair is damaged.
    """
    check_indexed_files(prefix)
    index = open_index(prefix)
    count = len(index.document_indices) - 1
    if not 0 <= document < count:
        raise ConfigurationError(f"document {document} of {prefix}: the documents are 0 to {count - 1}")
    first, behind = index.document_indices[document : document + 2].tolist()
    length = int(index.lengths[first:behind].sum())
    if length == 0:
        return []
    content = open_bin(prefix).read(int(index.pointers[first]), length * index.dtype.itemsize)
    return np.frombuffer(content, index.dtype.newbyteorder("<")).tolist()


_DOCUMENT = "--- document"
COLOURS = _GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
"""Every escape sequence of `shown`."""


def shown(tokenizer: Tokenizer, sample: Mapping[str, Any], *, in_color: bool) -> str:
    """Return a sample with a mask as text: what is trained on in green or between ⟦ and ⟧, a line for each document.

    A token is trained on where the loss of predicting it counts, at the token before it. The first token of a sample
    is predicted by none of it.
    """
    ids = [int(token) for token in sample["tokens"]]
    trained = [False, *(bool(counts) for counts in sample["loss_mask"])][: len(ids)]
    documents = list(itertools.accumulate(int(begins) for begins in sample["document_begins"]))
    before, behind = (_GREEN, _PLAIN) if in_color else ("⟦", "⟧")
    text = ""
    runs = itertools.groupby(range(len(ids)), key=lambda index: (documents[index], trained[index]))
    last = None
    for (document, counts), places in runs:
        if document != last and last is not None:
            text += f"\n{_DOCUMENT}\n"
        last = document
        part = printable(tokenizer.decode([ids[index] for index in places]))
        text += f"{before}{part}{behind}" if counts else part
    return text


def make_parser() -> ToolParser:
    """Return the parser of the tool's command line."""
    parser = ToolParser("Look into a .bin/.idx pair, or prove that it is whole.", __doc__)
    add = parser.add_argument
    add("command", choices=("show", "document", "verify"), help="what to do (or: sample --help)")
    add("prefix", help="path of the pair, without .bin or .idx")
    add("document", nargs="?", type=int, help="number of the document, from 0, for the command document")
    add("--html", type=Path, metavar="FILE", help="with show: write it as a page as well")
    add_tokenizer_flags(parser, required=False)
    return parser


def show(prefix: str, html: Path | None = None) -> None:
    """Print what is in a pair; write it as a page as well, if `html` is a path."""
    summary = summarize(prefix)
    made = made_with(prefix)
    lines = [
        f"{prefix}: {summary.tokens} tokens of type {summary.dtype}",
        *([] if made is None else [f"tokenizer {describe_tokenizer(made.tokenizer)}"]),
        f"documents {summary.documents}, {summary.empty_documents} of them empty; sequences {summary.sequences}",
        f"tokens in a sequence: {summary.shortest} to {summary.longest}, mean {summary.tokens / summary.sequences:.1f}",
    ]
    say("\n".join(lines))
    if html is not None:
        counts = charts.Series([(2**exponent, count) for exponent, count in enumerate(summary.histogram)])
        drawn = charts.chart("Sequences", "", [counts], along="tokens (up to twice as many)", doublings=True)
        write_output("--html", html, charts.page(prefix, lines, charts.main([drawn])))
    most = max(summary.histogram)
    for exponent, count in enumerate(summary.histogram):
        bar = "#" * round(50 * count / most)
        say(f"{2**exponent:>12} to {2 ** (exponent + 1) - 1:<12} {count:>12} {bar}".rstrip())


def verify(prefix: str, vocab_size: int | None) -> None:
    """Check a pair and print the outcome."""
    check_indexed_files(prefix)
    blocks = known_blocks(prefix)
    problem = first_damage(blocks)
    if problem is not None:
        raise DataError(f"{problem}. Copy the file again, or run megatron-ext preprocess again")
    if vocab_size is not None:
        check_token_ids(prefix, vocab_size)
    checked = "" if vocab_size is None else f", every token is below {vocab_size}"
    checked += ", as the checksums of its manifest say" if blocks else ""
    if exists(prefix, ".mask"):
        tokens = token_count(prefix)
        checked += f", its mask names {Mask(prefix, tokens).check()} of {tokens} tokens to train on"
    say(f"{prefix}: whole{checked}")


def sample(argv: list[str]) -> None:
    """Print the text of one sample, or of all samples of one step, of a training with the flags `argv`."""
    parser = ToolParser("Show the text that a training step saw. All other flags are those of the training.", __doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="the step, from 1")
    which.add_argument("--sample", type=int, help="the position of one sample in the training, from 0")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="with --assistant-only-loss, show what is trained on in green (auto: on a terminal, unless NO_COLOR is "
        "set), else in ⟦ ⟧",
    )
    options, flags = parser.parse_known_args(argv)
    is_coloured = options.color == "always" or (options.color == "auto" and in_colour())
    # As a dry run, for which --world-size, or that of --config, counts and not the ranks of this process.
    configured = configure([*flags, "--dry-run"])
    config = configured.config
    from megatron_ext import device

    device.install("cpu")  # before megatron-core is imported
    from megatron_ext.train.datasets import datasets_of_run, samples_of_step, tokenizer_of_run

    positions = samples_of_step(config, options.step) if options.sample is None else [options.sample]
    tokenizer = tokenizer_of_run(config)
    samples = datasets_of_run(config, tokenizer, configured.resume).train
    assert samples is not None
    for position in positions:
        if not 0 <= position < len(samples):
            raise ConfigurationError(f"sample {position}: the training has samples 0 to {len(samples) - 1}")
        window = samples.window_at(position)
        say(f"--- sample {position}: window {window.number} of {samples.sources[window.source].name}")
        content = samples[position]
        if config.data.assistant_only_loss:
            say(shown(tokenizer, content, in_color=is_coloured), colours=COLOURS)
        else:
            say(tokenizer.decode([int(token) for token in content["tokens"]]))


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    if argv[:1] == ["sample"]:
        sample(argv[1:])
        return 0
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.html is not None and options.command != "show":
        parser.error(f"--html goes with show, not with {options.command}; leave it out")
    if options.command == "show":
        show(options.prefix, options.html)
    elif options.command == "verify":
        verify(options.prefix, options.vocab_size)
    elif options.document is None:
        raise ConfigurationError("give the number of the document behind the prefix; they count from 0")
    else:
        ids = document_tokens(options.prefix, options.document)
        if options.tokenizer_type is None:
            say(" ".join(map(str, ids)))
        else:
            tokenizer = tokenizer_from_flags(DataConfig(**tokenizer_values(options)))
            made = made_with(options.prefix)
            judged = judge(options.prefix, made, tokenizer) if made is not None else None
            if judged is not None:
                warn(judged.text)
            say(tokenizer.decode(ids))
    return 0
