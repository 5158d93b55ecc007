"""Texts that are made to find a difference between two tokenizers."""

import random

from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer, special_pieces
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.tiktoken import TikTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer


def special_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens that are recognized in the text as a whole, and those that have a meaning of their own and
    are not."""
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.added_tokens()
    if isinstance(tokenizer, SentencePieceTokenizer):
        return special_pieces(tokenizer.model)[0]
    return list(tokenizer.special_tokens) if isinstance(tokenizer, TikTokenizer) else []


def probe_texts(tokenizer: Tokenizer, count: int = 250, seed: int = 0) -> list[str]:
    """Return texts made to find a difference: every kind of character, whitespace, repetition, special tokens.

    They are the same ones for the same tokenizer, count and seed.
    """
    chooser = random.Random(seed)
    special = special_texts(tokenizer)[:30]
    texts = ["", " ", "\n", "a" * 3000, " " * 300, "\r\n\t\0\x7f", "can't WE'LL I'm'd", "1234567890" * 9, "é" * 99]
    texts += [form.format(token) for token in special for form in ("{0}", "a {0} b", "x{0}{0}y", "\n{0}\n", " {0}.")]
    while len(texts) < count:
        alphabet = chooser.choice(_ALPHABETS)
        pieces = ["".join(_character(chooser, alphabet) for _ in range(chooser.randint(1, 12))) for _ in range(6)]
        if special and chooser.random() < 0.2:
            pieces.append(chooser.choice(special))
        chooser.shuffle(pieces)
        texts.append(chooser.choice(("", " ", "\n", "  ", "\n\n\t")).join(pieces))
    return texts


# Ranges of code points, first and last; surrogates are no text and left out.
_ALPHABETS: list[list[tuple[int, int]]] = [
    [(0x20, 0x7E)],
    [(0x61, 0x7A), (0x27, 0x27), (0x20, 0x20), (0x30, 0x39)],
    [(0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x2000, 0x200F), (0x2028, 0x202F), (0x3000, 0x3000)],
    [(0x00, 0x1F), (0x7F, 0x9F), (0x61, 0x63)],
    [(0xA1, 0x24F), (0x41, 0x5A)],
    [(0x61, 0x7A), (0x300, 0x36F), (0x1AB0, 0x1AFF)],
    [(0x370, 0x5FF)],
    [(0x600, 0x6FF), (0x30, 0x39), (0x660, 0x669)],
    [(0x900, 0xDFF), (0x966, 0x96F)],
    [(0xE00, 0x10FF)],
    [(0x1100, 0x11FF), (0xAC00, 0xD7A3)],
    [(0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xFF01, 0xFF5E)],
    [(0x2010, 0x205E), (0x20A0, 0x2BFF)],
    [(0x1F000, 0x1FAFF), (0x200D, 0x200D), (0xFE0F, 0xFE0F), (0x1F3FB, 0x1F3FF)],
    [(0xE000, 0xF8FF), (0xFDD0, 0xFDEF), (0xFEFF, 0xFEFF), (0xFFF0, 0xFFFF)],
    [(0x00, 0xD7FF), (0xE000, 0x10FFFF)],
]


def _character(chooser: random.Random, alphabet: list[tuple[int, int]]) -> str:
    first, last = alphabet[int(chooser.random() * len(alphabet))]
    return chr(first + int(chooser.random() * (last - first + 1)))  # randint() takes 5 times as long
