"""The tokenizer record: it describes, in a manifest, the tokenizer that made the data, and tells whether another one
gives the same ids."""

import hashlib
from collections.abc import Mapping
from typing import Any

from megatron_ext.tokenizer.simple import NullTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

_PROSE = (
    "The quick brown fox jumps over the lazy dog, and nobody knows why it was not stopped before the 2nd of March.",
    "for index, value in enumerate(values):\n    if value is None:\n        raise ValueError(f'{index}: no value')\n",
    "Die Straße war naß; l'été n'était pas fini. ¿Qué pasó ayer? Это было давно. 我们明天再谈。これは試験です。",
    '{"name": "record", "size": 1024, "items": [0.5, -3e-7, true, null], "path": "C:\\\\data\\\\x.txt"}',
    "<p class='note'>See https://example.org/a?b=1&c=2 for more&hellip;</p>\t\t# 3.14159 == 22/7\r\n",
)


def short_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return type, hash of the files, number of ids and end of document: equal for two readings of the same files."""
    return {**tokenizer.identity(), "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod}


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the short record, with digests by which two tokenizers of different files or types can be known as equal.

    `ids_sha256` is of the ids of some 250 texts, `vocabulary_sha256` of the text of each id. It takes up to a second.
    """
    record = short_record(tokenizer)
    if isinstance(tokenizer, NullTokenizer):
        return record  # encodes no text
    texts = (tokenizer.decode([number]) for number in range(tokenizer.vocab_size))
    return {**record, "ids_sha256": _ids_digest(tokenizer), "vocabulary_sha256": _digest("\0".join(texts))}


def same_tokenizer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the tokenizers of two records are known to give every text the same ids.

    Args:
        one, other: records by `tokenizer_record` or, with fewer digests, `short_record`.
    """
    if all(one.get(name) == other.get(name) for name in ("type", "sha256", "vocab_size", "eod")):
        return True
    wanted = ["vocab_size", "eod", "ids_sha256"]
    if one.get("type") == other.get("type"):  # two types may show the same special token differently
        wanted.append("vocabulary_sha256")
    return all(name in one and one[name] == other.get(name) for name in wanted)


def describe_tokenizer(record: Mapping[str, Any]) -> str:
    """Return a record in words: `HuggingFaceTokenizer 0123456789ab (8192 ids, end of document 0)`."""
    name = " ".join(filter(None, (str(record.get("type")), str(record.get("sha256", ""))[:12])))
    return f"{name} ({record.get('vocab_size')} ids, end of document {record.get('eod')})"


def _ids_digest(tokenizer: Tokenizer) -> str:
    from megatron_ext.tokenizer.probe_texts import probe_texts  # which loads every kind of tokenizer

    # Those of a tokenizer without special tokens: the same texts for all. Other texts here are other digests.
    return _digest("\n".join(_ids(tokenizer, text) for text in (*_PROSE, *probe_texts(NullTokenizer(1)))))


def _ids(tokenizer: Tokenizer, text: str) -> str:
    try:
        return " ".join(map(str, tokenizer.encode(text)))
    except (ValueError, TypeError) as error:
        return type(error).__name__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
