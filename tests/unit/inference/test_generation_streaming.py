"""A stream writes no part of a stop string or of a character, nothing twice, and in the end the whole text."""

import itertools
from typing import Any

from tokenizers import Tokenizer, decoders, models

from megatron_ext.inference.generation import Stream
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer


def _streamed(text: str, stop: tuple[str, ...], final: str) -> list[str]:
    """Return what is written after each byte of the text, and at the end."""
    pieces: list[str] = []
    stream = Stream(ByteTokenizer(), b"a", stop, pieces.append)
    tokens = list(text.encode())
    for count in range(1, len(tokens) + 1):
        stream(0, tokens[:count])
    stream.finish(final)
    return pieces


def test_a_stream_writes_what_is_certain() -> None:
    assert _streamed("aé!", (), "aé!") == ["a", "é", "!"]
    assert _streamed("ab\n\nc", ("\n\n",), "ab") == ["a", "b"]
    assert _streamed("ab\nc", ("\n\n",), "ab\nc") == ["a", "b", "\nc"]


def test_a_stream_begins_with_the_blank_before_its_first_word() -> None:
    model = Tokenizer(models.WordLevel({"\u2581once": 0, "\u2581upon": 1, "\u2581a": 2, "end": 3}, unk_token="end"))
    model.decoder = decoders.Metaspace()
    pieces: list[str] = []
    tokenizer: Any = LibraryTokenizer(model, "end")
    stream = Stream(tokenizer, [0], (), pieces.append)
    stream(0, [1])
    stream(0, [1, 2])
    assert pieces == [" upon", " a"]


def test_a_stream_is_the_text_that_is_returned() -> None:
    """Whatever stop strings begin with themselves or with each other: nothing of them is written, and nothing twice."""
    for stop in ((), ("aab",), ("aaa",), ("aba", "bb"), ("abab",), ("b",)):
        for letters in itertools.product("ab", repeat=6):
            whole = "".join(letters)
            ends = [whole.index(one) + len(one) for one in stop if one in whole]
            made = whole[: min(ends)] if ends else whole
            places = [made.index(one) for one in stop if one in made]
            final = made[: min(places)] if places else made
            written: list[str] = []
            stream = Stream(ByteTokenizer(), [*b"x"], stop, written.append)
            for count in range(1, len(made) + 1):
                stream(0, [*made[:count].encode()])
                assert final.startswith("".join(written)), (stop, whole)
            stream.finish(final)
            assert "".join(written) == final
            assert "" not in written
