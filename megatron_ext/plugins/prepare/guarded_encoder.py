"""Encodes by a fast program, and by the reference the texts on which the two are known to differ.

Two kinds of text are so rare that no sample has to show them, and go through the reference: if such a text can be cut
between words, only some hundred characters around the place do.

- Characters that this Python's Unicode version does not assign: the two programs have tables of different versions.
- Special pieces (`special_texts`) that stand in the text. SentencePiece never finds a control piece in a text,
  gigatoken does; and gigatoken takes a token marked `single_word` in the middle of a word.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Collection, Sequence

import numpy as np

from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer, special_pieces
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.probe_texts import special_texts
from megatron_ext.tokenizer.tokenizer_protocol import (
    BatchEncoder,
    Text,
    Tokenizer,
    between_words,
    in_pieces,
)

_ASCII = bytes(range(128))


_NOT_LOOKED_UP, _ASSIGNED, _UNASSIGNED = range(3)


_LAST_CHARACTER = 0x323AF  # behind this one lie planes without letters; all of them count as unassigned


_PIECE = 512  # characters that go through the reference for one place where the two programs differ


@functools.cache
def _states() -> np.ndarray:
    """Return the table of code points, uint8 [0x110000]: assigned, unassigned or not looked up yet.

    A code point is looked up when a text first has it: few ever are.
    """
    return np.zeros(0x110000, np.uint8)


def has_unassigned(text: Text) -> bool:
    """Return whether the text has a character that this Python's Unicode version does not assign.

    (A regular expression of so many ranges is 100 times slower.)
    """
    return not text.isascii() and any(_UNASSIGNED in _look_up(piece) for piece in in_pieces(text))


def _look_up(text: str) -> np.ndarray:
    """Return the states of the characters that are not ASCII."""
    others = text.encode("utf-8", "surrogatepass").translate(None, _ASCII).decode("utf-8", "surrogatepass")
    points = np.frombuffer(others.encode("utf-32-le", "surrogatepass"), "<u4")
    states = _states()
    looked_up = states[points]
    if _NOT_LOOKED_UP in looked_up:
        for point in set(points[looked_up == _NOT_LOOKED_UP].tolist()):
            is_assigned = point <= _LAST_CHARACTER and unicodedata.category(chr(point)) != "Cn"
            states[point] = _ASSIGNED if is_assigned else _UNASSIGNED
        looked_up = states[points]
    return looked_up


def joined(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of texts one after another, and the number of each; nothing is copied where there is one text."""
    lengths = np.array([len(one) for one in ids], np.int64)
    if len(ids) == 1:
        return ids[0], lengths
    return np.concatenate(ids) if len(ids) else np.zeros(0, np.int64), lengths


class SpecialPieces:
    """Finds out whether a text holds a special piece.

    Args:
        pieces: texts of the special pieces.
        normalized: gives the text that the tokenizer looks at, where some pieces are found in that alone.
    """

    def __init__(self, pieces: Collection[str], normalized: Callable[[Text], Text] | None = None):
        pattern = _any_of({piece for piece in pieces if piece})
        self._in_string, self._in_bytes = re.compile(pattern), re.compile(pattern.encode())
        self._normalized = normalized

    def are_in(self, text: Text) -> bool:
        """Return whether the text, as it is or normalized, holds a special piece."""
        return self._found(text) or (self._normalized is not None and self._found(self._normalized(text)))

    def _found(self, text: Text) -> bool:
        return (self._in_string.search(text) if isinstance(text, str) else self._in_bytes.search(text)) is not None


def _any_of(texts: set[str]) -> str:
    """Return a regular expression that matches any of the texts, as a tree of their prefixes.

    (A plain list of 1,000 alternatives takes 1,000 comparisons at every "<" of a page.)
    """
    if not texts:
        return "(?!)"
    if "" in texts:
        return ""  # the longer ones hold this one
    branches = []
    for _, group in itertools.groupby(sorted(texts), key=lambda text: text[0]):
        same = list(group)
        apart = (n for n, (one, other) in enumerate(zip(same[0], same[-1], strict=False)) if one != other)
        begin = same[0][: next(apart, None)]
        branches.append(re.escape(begin) + _any_of({text[len(begin) :] for text in same}))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def special_pieces_of(tokenizer: Tokenizer) -> SpecialPieces:
    """Return the special pieces of a tokenizer. Raises ConfigurationError where they cannot be read."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        pieces, are_found = special_pieces(tokenizer.model)
        return SpecialPieces(pieces, tokenizer.normalized if are_found else None)
    pieces = special_texts(tokenizer)
    if isinstance(tokenizer, LibraryTokenizer) and tokenizer.finds_in_normalized():
        return SpecialPieces([*pieces, *map(tokenizer.normalized, pieces)], tokenizer.normalized)
    return SpecialPieces(pieces)


class Guarded:
    """The fast encoder, with the reference in its place for young characters and for special pieces.

    Args:
        encoder: the fast encoder.
        reference: the encoder that it has to agree with.
        can_be_cut: whether a text that is cut between two words has the ids of its pieces, one after another.
        special: the special pieces of the tokenizer.
    """

    def __init__(self, encoder: BatchEncoder, reference: BatchEncoder, can_be_cut: bool, special: SpecialPieces):
        self._encoder = encoder
        self._reference = reference
        self._can_be_cut = can_be_cut
        self._special = special
        self.by_reference = 0
        """Number of texts of the last call that the reference encoded, at least in part."""

    def __call__(self, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        guarded = {n for n, text in enumerate(texts) if self._is_guarded(text)}
        self.by_reference = len(guarded)
        if not guarded:
            return self._encoder(texts)
        ids, lengths = self._encoder(["" if n in guarded else text for n, text in enumerate(texts)])
        pieces = np.split(ids, np.cumsum(lengths)[:-1])
        for n in guarded:
            pieces[n] = self._encode_guarded(texts[n]).astype(np.uint32, copy=False)
        return joined(pieces)

    def _is_guarded(self, text: Text) -> bool:
        return has_unassigned(text) or self._special.are_in(text)

    def _encode_guarded(self, text: Text) -> np.ndarray:
        if not self._can_be_cut:
            return self._reference([text])[0]
        parts = []
        for long_piece in between_words(text):  # so that a long text is not a million short ones at a time
            for is_guarded, run in itertools.groupby(between_words(long_piece, _PIECE), self._is_guarded):
                encoder = self._reference if is_guarded else self._encoder
                parts.append(encoder(["".join(run)])[0].astype(np.uint32, copy=False))  # int64 would be all of them
        return np.concatenate(parts)
