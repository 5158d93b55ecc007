"""Defines what every tokenizer offers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # --help and --dry-run do without numpy
    import numpy as np

    from megatron_ext.tokenizer.text import Text

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
        """Return the text of `ids`; what is not valid UTF-8 becomes U+FFFD."""
        ...

    def identity(self) -> dict[str, str | int]:
        """Return what tells this tokenizer from any other, whatever path it was read from: part of cache keys."""
        ...
