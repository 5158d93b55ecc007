"""Tokenizers without a file: UTF-8 bytes as tokens (0-255 are the bytes, 256 ends a document), and ids as they are.

The second reads decimal numbers with a space between: for benchmarks and for data that is already ids.
"""

from collections.abc import Sequence


class ByteTokenizer:
    """Encodes a text as its UTF-8 bytes."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes among `ids`; ends of documents leave no trace."""
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")

    def identity(self) -> dict[str, str | int]:
        """Return the type, which tells this tokenizer from any other."""
        return {"type": "ByteTokenizer"}


class NullTokenizer:
    """Reads ids from a text of numbers. As in Megatron, the last id ends a document."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        """Return the numbers in `text`."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Return `ids` as numbers with a space between."""
        return " ".join(str(i) for i in ids)

    def identity(self) -> dict[str, str | int]:
        """Return type and vocabulary size, which tell this tokenizer from any other."""
        return {"type": "NullTokenizer", "vocab_size": self.vocab_size}
