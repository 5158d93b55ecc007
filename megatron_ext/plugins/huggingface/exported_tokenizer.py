"""Proves an exported tokenizer: it gives the ids of the tokenizer that the model was trained with, and back.

The folder is read twice: with the library `tokenizers`, as --tokenizer-type HuggingFaceTokenizer reads it, and with
transformers' AutoTokenizer where that is installed, as those who get the folder will.

AutoTokenizer takes a class, by `tokenizer_class` in tokenizer_config.json or else by the model's type. Some classes
read tokenizer.json as it is; others (GPT2Tokenizer, Qwen2Tokenizer) keep only its vocabulary and merges and build a
normalizer and a split of their own. Where these give other ids, the export names a class that reads tokenizer.json.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config.schema import Config
from megatron_ext.data.integrity import check_indexed_files, open_index, share_of
from megatron_ext.data.splits import split_files
from megatron_ext.durable import replace_text
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.terminal import warn
from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer, user_defined_symbols
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_ext.tokenizer.probe_texts import probe_texts
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

_PROBES = 1000
_DOCUMENTS = 64
_TOKENS = 1024  # of each document
_BLANKS = ("  leading", "trailing  ", "a  b   c", "\t\n\n  x\r\n", "\n", "▁", "a▁b", "ab" * 500, "-" * 80)
_CODE = 'def f(x):\n    """Doc."""\n    return {"a": [x ** 2, 3.14e-10, 0xFF], "b": "é\\n"}  # ☃\n\n\n\tif x:\n'
_NAMES = ("<unk>", "<s>", "</s>", "<pad>", "<0x0A>", "<|endoftext|>", "<mask>", "[CLS]")


@dataclass(frozen=True)
class SameIds:
    """Reports what was compared."""

    probes: int
    documents: int
    by: tuple[str, ...]
    """Names of those who read the folder."""
    note: str | None
    """Why no validation data was read, where none was."""


@dataclass(frozen=True)
class _Reader:
    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def check_ids(folder: Path, config: Config, tokenizer: Tokenizer) -> SameIds:
    """Compare the folder's tokenizer with `tokenizer`, which training used, on probe texts and on validation data.

    Where AutoTokenizer reads the folder with a class that rebuilds the pipeline and so gives other ids, the folder's
    `tokenizer_class` becomes PreTrainedTokenizerFast, and a warning says so.

    Raises:
        DataError: the ids or the id that ends a document differ, or `folder` decodes ids into another text; the message
            has the shortest such text, and both.
    """
    written = HuggingFaceTokenizer(str(folder))
    if written.eod != tokenizer.eod:
        raise DataError(
            f"a document ends with id {tokenizer.eod} in training and with id {written.eod} in the exported tokenizer; "
            f'set "eos_token" in its tokenizer_config.json to the former. {_WAYS_OUT}'
        )
    probes = list(_probes(written, tokenizer))
    documents, note = _held_out_texts(config, tokenizer)
    _compare(_Reader("tokenizers", written.encode, written.decode), tokenizer, [*probes, *documents])
    readers = ["tokenizers"]
    if importlib.util.find_spec("transformers"):
        _compare_with_transformers(written, tokenizer, [*probes, *documents])
        readers.append("transformers")
    return SameIds(len(probes), len(documents), tuple(readers), note)


_WAYS_OUT = (
    "--skip-tokenizer-check exports the tokenizer all the same, --no-tokenizer leaves it out: encode with the training "
    "tokenizer then"
)


def _compare_with_transformers(written: HuggingFaceTokenizer, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Compare the tokenizer that AutoTokenizer reads from the folder; see the head of this file for the class that it
    takes."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(written.folder)
    taken = _read_by(AutoTokenizer, folder)
    try:
        return _compare(_reader_of(taken), tokenizer, texts)
    except DataError:
        _compare(_reader_of(_read_by(PreTrainedTokenizerFast, folder)), tokenizer, texts)  # else no class helps
    rebuilds, settings = type(taken).__name__, {**written.settings, "tokenizer_class": _AS_IT_IS}
    replace_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    try:
        _compare(_reader_of(_read_by(AutoTokenizer, folder)), tokenizer, texts)
    except DataError as error:
        raise DataError(
            f"{error}. For this type of model AutoTokenizer takes {rebuilds} whatever tokenizer_config.json says; it "
            "keeps only vocabulary and merges of tokenizer.json. Export with --skip-tokenizer-check, and read the "
            f"folder with transformers' {_AS_IT_IS}.from_pretrained, which gives the ids of training"
        ) from None
    warn(
        f"transformers' {rebuilds} keeps only vocabulary and merges of tokenizer.json and gives other ids than "
        f'training: the exported tokenizer_config.json says "tokenizer_class": "{_AS_IT_IS}" instead'
    )


_AS_IT_IS = "PreTrainedTokenizerFast"


def _read_by(reader: Any, folder: Path) -> Any:
    # No code from the folder is run.
    return reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _reader_of(tokenizer: Any) -> _Reader:
    return _Reader(
        "transformers",
        lambda text: tokenizer(text).input_ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
    )


def _probes(written: HuggingFaceTokenizer, tokenizer: Tokenizer) -> Iterator[str]:
    yield from probe_texts(written, _PROBES)
    yield from (*_BLANKS, _CODE)
    names = list(_NAMES)
    if isinstance(tokenizer, SentencePieceTokenizer):
        names += user_defined_symbols(tokenizer.model)[:30]
    for name in names:
        yield from (form.format(name) for form in ("{0}", "a {0} b", "x{0}{0}y", " {0}."))


def _compare(reader: _Reader, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    pairs = [(text, tokenizer.encode(text), reader.encode(text)) for text in texts]
    wrong = [pair for pair in pairs if pair[1] != pair[2]]
    if wrong:
        text, ids, exported = min(wrong, key=lambda pair: len(pair[0]))
        raise DataError(
            f"the exported tokenizer, read by {reader.name}, gives other ids than "
            f"{tokenizer.identity()['type']} on {len(wrong)} of {len(pairs)} texts. The shortest is {_short(text)}: "
            f"{_short(ids)} in training, {_short(exported)} in the export. {_WAYS_OUT}"
        )
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return  # its folder, which says how to decode, was copied
    back = [(text, tokenizer.decode(ids), ids) for text, ids, _ in pairs]
    lost = [(text, ids) for text, again, ids in back if again == text and reader.decode(ids) != text]
    if lost:
        text, ids = min(lost, key=lambda pair: len(pair[0]))
        raise DataError(
            f"the exported tokenizer, read by {reader.name}, decodes the ids of {len(lost)} of {len(pairs)} texts into "
            f"another text. The shortest is {_short(text)}: it becomes {_short(reader.decode(ids))}. {_WAYS_OUT}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _held_out_texts(config: Config, tokenizer: Tokenizer) -> tuple[list[str], str | None]:
    """Return the documents of the validation data (where there is none, of the training data), decoded; or why there
    are none."""
    files = split_files(config, "valid") or split_files(config, "train")
    if files is None:
        return [], "the run names no data files"
    texts: list[str] = []
    for prefix in files.blend.prefixes:
        try:
            check_indexed_files(prefix)
            texts += [tokenizer.decode(ids) for ids in _documents(prefix, files.bounds, tokenizer.eod)]
        except (ConfigurationError, DataError, OSError) as error:  # the first of files that are gone
            return [], f"{files.flag} {prefix} cannot be read ({error})"
        if len(texts) >= _DOCUMENTS:
            break
    return texts, None


def _documents(prefix: str, bounds: tuple[float, float], eod: int) -> Iterator[list[int]]:
    """Yield the first tokens of some sequences from all over this share of the corpus, without ends of documents."""
    index, share = open_index(prefix), share_of(prefix, bounds)
    step = max(1, (share.end - share.first) // _DOCUMENTS)
    for sequence in range(share.first, share.end, step)[:_DOCUMENTS]:
        count = min(int(index.lengths[sequence]), _TOKENS)
        ids = np.fromfile(f"{prefix}.bin", index.dtype, count, offset=int(index.pointers[sequence]))
        yield [id for id in ids.tolist() if id != eod]
