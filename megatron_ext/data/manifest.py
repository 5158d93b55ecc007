"""The manifest that lies next to a .bin/.idx pair, and whether a run's tokenizer is the one that it names.

`tools/preprocess_data.py --output-prefix data/corpus` writes data/corpus_text_document.bin and .idx, and
data/corpus_manifest.json; `tools/merge_datasets.py --output-prefix data/all` writes data/all_manifest.json. A pair
without one, as Megatron-LM writes it, or one that was replaced since, has no known tokenizer. No torch here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.stored import local_file, open_bin
from megatron_ext.errors import StorageError
from megatron_ext.tokenizer.protocol import Tokenizer
from megatron_ext.tokenizer.record import describe_tokenizer, same_tokenizer, short_record, tokenizer_record
from megatron_ext.untrusted.text import load_json, read_file

_LARGEST = 1 << 26  # bytes; one of a thousand input files has some 200,000


@dataclass(frozen=True)
class MadeWith:
    """The tokenizer that made a pair, and the manifest that says so."""

    tokenizer: Mapping[str, Any]
    """The tokenizer's record as `megatron_ext.tokenizer.record` writes it; older manifests hold the short record."""
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
    """Yield the content of every manifest that may speak of `<prefix>.bin`, that of the longest name first."""
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
    """What there is to say of the tokenizer of some data and that of the run."""

    text: str
    is_wrong: bool
    """Whether it is an error; otherwise it is a warning."""


def judge(what: str, made: MadeWith, tokenizer: Tokenizer) -> Judged | None:
    """Return what is wrong where another tokenizer than the run's made the data; None where the run's made it.

    NullTokenizer says nothing but how many ids there are: it goes with every tokenizer that has no more, on
    either side (benchmarks over real data, and data whose ids come from elsewhere).

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
