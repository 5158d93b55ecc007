"""The protocol that every tokenizer implements.

A text is a string, or, where it is long, its UTF-8: Python takes four bytes a character for a text with an emoji.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # --help and --dry-run do without numpy
    import numpy as np


import codecs
import re
from collections.abc import Iterator

Text = str | bytes
END_OF_TEXT = "<|endoftext|>"
"""Text of the special token that ends a document in GPT-2's vocabulary, and in those that are trained here."""

LONG = 1 << 22  # bytes from which on a text is UTF-8
_PIECE = 1 << 20  # characters or bytes looked at in one go


def as_string(text: Text) -> str:
    """Return a text as a Python string."""
    return text if isinstance(text, str) else text.decode("utf-8")


def beginning(text: Text, characters: int) -> str:
    """Return the first characters of a text."""
    if isinstance(text, str):
        return text[:characters]
    # A character that is cut in two at the end is left out.
    return text[: 4 * characters].decode("utf-8", errors="ignore")[:characters]


def in_pieces(text: Text) -> Iterator[str]:
    """Yield the text as strings of about a million characters, cut anywhere."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for first in range(0, len(text), _PIECE):
        piece = text[first : first + _PIECE]
        yield piece if isinstance(piece, str) else decoder.decode(piece)


# Behind a letter and before a space with a letter, ASCII all.
_BETWEEN_WORDS = re.compile(r"[a-zA-Z](?= [a-zA-Z])")


def between_words(text: Text, size: int | None = None) -> Iterator[str]:
    """Yield the text in pieces of about `size` (default a million) characters, or longer, that begin before a word.

    With byte-level BPE the ids of the pieces, one after another, are the ids of the whole text: GPT-2's pattern and
    similar ones end a match at such a cut and begin the next match after it, without looking back.
    """
    size = size or _PIECE
    rest = ""
    for piece in in_pieces(text):
        rest += piece
        begin, cut = 0, None
        while len(rest) - begin > size and (cut := _BETWEEN_WORDS.search(rest, begin + size // 2)) is not None:
            yield rest[begin : cut.end()]
            begin = cut.end()
        rest = rest[begin:]
    if rest:
        yield rest


# Texts -> the ids of all, one after another, and the number of ids of each.
# Raises ValueError or TypeError for a text that cannot be encoded.
type BatchEncoder = Callable[[Sequence[Text]], tuple[np.ndarray, np.ndarray]]


class Tokenizer(Protocol):
    """Turns text into token ids and back. Nothing here imports torch."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included, before any padding; every id is below it."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no end of document. Raises UnicodeEncodeError for a lone surrogate."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        ...

    def identity(self) -> dict[str, str | int]:
        """Return values that tell this tokenizer from any other, whatever path it was read from: part of cache keys."""
        ...
