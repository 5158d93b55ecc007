"""Any of our tokenizers can be written as the two files that transformers reads: tokenizer.json and
tokenizer_config.json.

    write_tokenizer(tokenizer, folder)
    transformers.AutoTokenizer.from_pretrained(folder)("some text").input_ids == tokenizer.encode("some text")

The class is named PreTrainedTokenizerFast, so that transformers takes tokenizer.json as it is: under the name of a
model's own class (LlamaTokenizer, GPT2Tokenizer) it would build another pipeline from the vocabulary. Nothing is put
before or after a text, because training adds nothing either.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from megatron_ext.durable import replace_text
from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer, from_sentencepiece, merges
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer, NullTokenizer
from megatron_ext.tokenizer.tiktoken import PATTERNS, TikTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import END_OF_TEXT
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer as Protocol


def write_tokenizer(tokenizer: Protocol, folder: Path) -> list[str]:
    """Write the files into `folder` and return their names: none for NullTokenizer, which has no text.

    A tokenizer_config.json that `folder` has already stays as it is.

    Raises:
        ConfigurationError: the tokenizer is a SentencePiece model with a feature that tokenizer.json lacks.
        OSError: the folder cannot be written.
    """
    if isinstance(tokenizer, NullTokenizer):
        return []
    content, settings = _converted(tokenizer)
    replace_text(folder / "tokenizer.json", content)
    if not (folder / "tokenizer_config.json").exists():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **settings,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
        }
        replace_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    return ["tokenizer.json", "tokenizer_config.json"]


def _converted(tokenizer: Protocol) -> tuple[str, dict[str, Any]]:
    """Return the content of tokenizer.json, and the settings that depend on the tokenizer."""
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.to_json(), {"eos_token": tokenizer.end_of_document}
    if isinstance(tokenizer, TikTokenizer):
        return _tiktoken(tokenizer).to_str(), {"eos_token": "</s>", "unk_token": "<unk>"}
    # In the text of these two, a special token is no more than its characters.
    if isinstance(tokenizer, ByteTokenizer):
        return _bytes(tokenizer).to_str(), {"eos_token": END_OF_TEXT, "split_special_tokens": True}
    assert isinstance(tokenizer, SentencePieceTokenizer)
    named = {"eos_token": tokenizer.piece(tokenizer.eod), "unk_token": tokenizer.piece(tokenizer.unknown)}
    return from_sentencepiece(tokenizer.model).to_str(), {**named, "split_special_tokens": True}


def _character_of_byte() -> list[str]:
    """Return the characters by which the library's byte-level entries write the bytes 0 to 255 (GPT-2's encoder.py).

    Printable ones of Latin-1 stand for themselves, the others are counted from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def _bytes(tokenizer: ByteTokenizer) -> Tokenizer:
    ids = {character: byte for byte, character in enumerate(_character_of_byte())}
    made = Tokenizer(models.BPE(vocab={**ids, END_OF_TEXT: tokenizer.eod}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return made


def _tiktoken(tokenizer: TikTokenizer) -> Tokenizer:
    """Return tiktoken's ranks as merges. The special tokens are found in a text first, and a word that is an entry is
    not merged."""
    characters = _character_of_byte()
    entries = {"".join(characters[byte] for byte in token): number for token, number in tokenizer.ranks.items()}
    special = tokenizer.special_tokens
    # A token of the same text as a special one is never found; a space, which no byte-level entry has, tells it apart.
    named = {f"{name} " if name in special else name: number for name, number in entries.items()}
    ordered = sorted(entries, key=entries.__getitem__)
    pairs = [pair for pair in merges(ordered, entries) if not {*pair, "".join(pair)} & special.keys()]
    made = Tokenizer(models.BPE(vocab={**special, **named}, merges=pairs, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERNS[tokenizer.pattern]), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return made
