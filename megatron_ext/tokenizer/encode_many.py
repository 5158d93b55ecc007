"""Many texts are encoded at once: through the tokenizer itself, or through a faster program that gives the same ids.

The fast one is gigatoken (SIMD byte-pair encoding) where it covers the tokenizer. It is another program than the
reference, so nothing here trusts it: `first_difference` compares the two, on probes and on texts of the input.
Text on which they are known to differ goes through the reference (`guarded_encoder`).
"""

import base64
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer
from megatron_ext.tokenizer.guarded_encoder import Guarded, joined, special_pieces_of, special_texts
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer, NullTokenizer
from megatron_ext.tokenizer.tiktoken import TikTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import (
    LONG,
    BatchEncoder,
    Text,
    Tokenizer,
    as_string,
    between_words,
)

# Bytes of the longest text that a tokenizer gets as a whole. The library `tokenizers` takes 150 times the bytes of a
# text, sentencepiece 35 times, a list of ids some 20 times; where 1 GB is not enough, an error is better than a kill.
_LONGEST = {SentencePieceTokenizer: 12 << 20, ByteTokenizer: 32 << 20, NullTokenizer: 32 << 20}  # else LONG


def plain_encoder(tokenizer: Tokenizer) -> BatchEncoder:
    """Return an encoder that calls `tokenizer.encode` on one text after another: the reference, for every tokenizer."""
    can_be_cut = _can_be_cut(tokenizer)
    longest = next((size for kind, size in _LONGEST.items() if isinstance(tokenizer, kind)), LONG)

    def encode_one(text: Text) -> np.ndarray:
        if len(text) > longest and not can_be_cut:
            raise ValueError(
                f"{len(text) / 1e6:.1f} MB are too long for {tokenizer.identity()['type']}, which takes many times the "
                f"bytes of a text (at most {longest / 1e6:.1f} MB keep it below 1 GB), and the ids could change if it "
                "were cut here. Split the document, or leave it out with --on-error skip"
            )
        if can_be_cut and len(text) > LONG:
            return np.concatenate([to_array(piece).astype(np.uint32, copy=False) for piece in between_words(text)])
        return to_array(as_string(text))

    def to_array(text: str) -> np.ndarray:
        if isinstance(tokenizer, (SentencePieceTokenizer, TikTokenizer)):
            return tokenizer.encode_to_array(text)
        # int64, so that an id out of any range arrives as it is.
        return np.asarray(tokenizer.encode(text), dtype=np.int64)

    def encode(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        return joined([encode_one(text) for text in texts])

    return encode


def _can_be_cut(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer, (LibraryTokenizer, TikTokenizer)) and tokenizer.splits_between_words()


def fast_encoder(tokenizer: Tokenizer) -> BatchEncoder:
    """Return a faster encoder for this tokenizer, to be compared with the plain one before it is used.

    Raises:
        ValueError: there is none; the text says why.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return _encode_bytes
    try:
        encoder, special = _gigatoken(tokenizer), special_pieces_of(tokenizer)
    except ImportError as error:
        raise ValueError("the package gigatoken is not installed") from error
    except (ConfigurationError, ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"gigatoken does not cover it: {error}") from error
    if encoder is None:
        raise ValueError(f"there is none for {tokenizer.identity()['type']}")
    return Guarded(encoder, plain_encoder(tokenizer), _can_be_cut(tokenizer), special)


def _gigatoken(tokenizer: Tokenizer) -> BatchEncoder | None:
    """Return gigatoken as this tokenizer; None if it has nothing of the kind. Raises one of many errors if it
    cannot."""
    import gigatoken

    if isinstance(tokenizer, LibraryTokenizer):
        return _Gigatoken(gigatoken.Tokenizer.from_json(tokenizer.to_json()), *tokenizer.frame())
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _Gigatoken(gigatoken.Tokenizer.from_sentencepiece(tokenizer.model))
    return _gigatoken_for_tiktoken(tokenizer) if isinstance(tokenizer, TikTokenizer) else None


def _encode_bytes(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [text if isinstance(text, bytes) else text.encode("utf-8") for text in texts]
    whole = encoded[0] if len(encoded) == 1 else b"".join(encoded)
    return np.frombuffer(whole, np.uint8), np.array([len(one) for one in encoded], np.int64)


# Its batches come as arrays of the package awkward, whose import takes 0.2 s and 50 MB: only for many short texts.
_MEAN_FOR_ONE_BY_ONE = 256  # characters


class _Gigatoken:
    """Encodes with gigatoken on the calling thread, and adds the ids that the tokenizer's template puts around each
    text."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._before = np.array(before, np.uint32)
        self._after = np.array(after, np.uint32)

    def __call__(self, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        if not texts:
            return np.zeros(0, np.uint32), np.zeros(0, np.int64)
        if sum(map(len, texts)) >= _MEAN_FOR_ONE_BY_ONE * len(texts) or any(isinstance(text, bytes) for text in texts):
            return self._frame(*joined([self._tokenizer.encode(text) for text in texts]))
        rows = self._tokenizer.encode_batch(list(texts), parallel=False).layout
        offsets = rows.offsets.data
        ids = rows.content.data[offsets[0] : offsets[-1]]
        return self._frame(ids, np.diff(offsets))

    def _frame(self, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not len(self._before) + len(self._after):
            return ids, lengths
        framed_lengths = lengths + len(self._before) + len(self._after)
        ends = np.cumsum(framed_lengths)
        begins = ends - framed_lengths
        framed = np.empty(int(ends[-1]), ids.dtype)
        framed[begins[:, None] + np.arange(len(self._before))] = self._before
        framed[ends[:, None] - np.arange(len(self._after), 0, -1)] = self._after
        moved = begins + len(self._before) - (np.cumsum(lengths) - lengths)
        framed[np.arange(len(ids)) + np.repeat(moved, lengths)] = ids
        return framed, framed_lengths


# gigatoken's name for a pattern of TikTokenizer; it has none that splits as v1.
_TIKTOKEN_SCHEMES = {"v2": "nemotron"}


def _gigatoken_for_tiktoken(tokenizer: TikTokenizer) -> BatchEncoder:
    """Return gigatoken with tiktoken's ids: it wants ranks from 0 and the special tokens behind them; here the special
    tokens come first."""
    import gigatoken

    if tokenizer.pattern not in _TIKTOKEN_SCHEMES:
        raise ValueError(f"it cannot split as --tiktoken-pattern {tokenizer.pattern}")
    tokens, special = len(tokenizer.ranks), len(tokenizer.special_tokens)
    behind = {text: number + tokens for text, number in tokenizer.special_tokens.items()}
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        for rank, token in enumerate(tokenizer.ranks):
            file.write(b"%s %d\n" % (base64.b64encode(token), rank))
        file.flush()
        model = gigatoken.Tokenizer.from_tiktoken(file.name, _TIKTOKEN_SCHEMES[tokenizer.pattern], behind)
    encoder = _Gigatoken(model)

    def encode(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = encoder(texts)
        return np.where(ids < tokens, ids + np.uint32(special), ids - np.uint32(tokens)), lengths

    return encode


def first_difference(encoder: BatchEncoder, reference: BatchEncoder, texts: Sequence[str]) -> str | None:
    """Return the first text that the two encode differently, or that only the reference accepts; None if there is
    none."""
    accepted, expected = [], []
    for text in texts:
        try:
            expected.append(reference([text])[0])
            accepted.append(text)
        except (ValueError, TypeError):
            continue  # no run gets past such a text
    try:
        ids, lengths = encoder(accepted)
        actual = np.split(ids, np.cumsum(lengths)[:-1])
    except (ValueError, TypeError, RuntimeError):
        actual = [_ids_or_none(encoder, text) for text in accepted]
    for text, one, other in zip(accepted, actual, expected, strict=True):
        if one is None or not np.array_equal(one, other):
            return text
    return None


def _ids_or_none(encoder: BatchEncoder, text: str) -> np.ndarray | None:
    try:
        return encoder([text])[0]
    except (ValueError, TypeError, RuntimeError):
        return None


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
