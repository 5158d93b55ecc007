"""Writes a text as it is generated, a piece with each token."""

from collections.abc import Callable, Sequence

from megatron_ext.inference.generation import text_after
from megatron_ext.tokenizer.protocol import Tokenizer


class Stream:
    """Writes what is certain of a growing text: no half character, and nothing that may belong to a stop string.

    Args:
        tokenizer: decodes the ids.
        prompt: ids that the text goes on from.
        stop: strings before which the text ends.
        write: takes each piece.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], write: Callable[[str], object]
    ):
        self._tokenizer, self._prompt, self._stop, self._write = tokenizer, prompt, stop, write
        self._written = 0

    def __call__(self, number: int, tokens: list[int]) -> None:
        """Write what the last token has made certain; an `OnToken` of `generation`."""
        text = text_after(self._tokenizer, self._prompt, tokens).rstrip("\ufffd")
        held = max((_overlap(text, one) for one in self._stop), default=0)
        self._until(text[: len(text) - held])

    def finish(self, text: str) -> None:
        """Write the rest of the whole text."""
        self._until(text)

    def _until(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text the stop string begins with, or holds whole."""
    if stop in text:
        return len(text) - text.find(stop)
    return next((length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length])), 0)
