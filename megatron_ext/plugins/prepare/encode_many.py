"""Many texts are encoded at once: through the tokenizer itself, or through a faster program that gives the same ids.

The fast one is gigatoken (SIMD byte-pair encoding) where it covers the tokenizer. It is another program than the
reference, so nothing here trusts it: `first_difference` compares the two, on probes and on texts of the input.
Text on which they are known to differ goes through the reference (`guarded_encoder`).
"""

import base64
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prepare.guarded_encoder import Guarded, joined, special_pieces_of
from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer
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
