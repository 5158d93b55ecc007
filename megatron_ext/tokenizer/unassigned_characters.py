"""Characters that are younger than Python's Unicode tables, and an encoder that keeps them from the fast tokenizer.

The fast tokenizer and the reference have tables of different Unicode versions. They can differ on a character that only
one of them knows, and no sample would show it. So a text with a character that this Python's version does not assign
goes through the reference: if it can be cut between words, only some hundred characters around that character do.
"""

import functools
import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np

from megatron_ext.tokenizer.protocol import BatchEncoder
from megatron_ext.tokenizer.text import Text, between_words, in_pieces

_ASCII = bytes(range(128))
_NOT_LOOKED_UP, _ASSIGNED, _UNASSIGNED = range(3)
_LAST_CHARACTER = 0x323AF  # behind this one lie planes without letters; all of them count as unassigned
_PIECE = 512  # characters that go through the reference for one that is not assigned


@functools.cache
def _states() -> np.ndarray:
    """Return what is known of each code point, uint8 [0x110000]. It is looked up when it is first seen: few ever
    are."""
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
    found = states[points]
    if _NOT_LOOKED_UP in found:
        for point in set(points[found == _NOT_LOOKED_UP].tolist()):
            is_assigned = point <= _LAST_CHARACTER and unicodedata.category(chr(point)) != "Cn"
            states[point] = _ASSIGNED if is_assigned else _UNASSIGNED
        found = states[points]
    return found


def joined(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of texts one after another, and the number of each; nothing is copied where there is one text."""
    lengths = np.array([len(one) for one in ids], np.int64)
    if len(ids) == 1:
        return ids[0], lengths
    return np.concatenate(ids) if len(ids) else np.zeros(0, np.int64), lengths


class Guarded:
    """The fast encoder, with the reference in its place for characters that are younger than Python's Unicode tables.

    Args:
        encoder: the fast encoder.
        reference: the encoder that it has to agree with.
        can_be_cut: whether the ids of a text are those of its pieces if it is cut between two words.
    """

    def __init__(self, encoder: BatchEncoder, reference: BatchEncoder, can_be_cut: bool):
        self._encoder = encoder
        self._reference = reference
        self._can_be_cut = can_be_cut

    def __call__(self, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        guarded = {n for n, text in enumerate(texts) if has_unassigned(text)}
        if not guarded:
            return self._encoder(texts)
        ids, lengths = self._encoder(["" if n in guarded else text for n, text in enumerate(texts)])
        pieces = np.split(ids, np.cumsum(lengths)[:-1])
        for n in guarded:
            pieces[n] = self._encode_guarded(texts[n]).astype(np.uint32, copy=False)
        return joined(pieces)

    def _encode_guarded(self, text: Text) -> np.ndarray:
        if not self._can_be_cut:
            return self._reference([text])[0]
        parts = []
        for long_piece in between_words(text):  # so that a long text is not a million short ones at a time
            for is_guarded, run in itertools.groupby(between_words(long_piece, _PIECE), has_unassigned):
                encoder = self._reference if is_guarded else self._encoder
                parts.append(encoder(["".join(run)])[0].astype(np.uint32, copy=False))  # int64 would be all of them
        return np.concatenate(parts)
