"""Token ids are written as decimal numbers with a space between: for benchmarks and for data that is already ids."""

from collections.abc import Sequence


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
        """Return what tells this tokenizer from any other."""
        return {"type": "NullTokenizer", "vocab_size": self.vocab_size}
