"""UTF-8 bytes as tokens: 0-255 are the bytes, 256 ends a document. Needs no file."""

from collections.abc import Sequence


class ByteTokenizer:
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes among `ids`; ends of documents leave no trace."""
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")

    def identity(self) -> dict[str, str | int]:
        return {"type": "ByteTokenizer"}
