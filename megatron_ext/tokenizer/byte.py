"""UTF-8 bytes are the tokens: 0-255 are the bytes, 256 ends a document. This needs no file."""

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
        """Return what tells this tokenizer from any other."""
        return {"type": "ByteTokenizer"}
