"""What a model writes is what a plain loop over a model that is a table writes, however many prompts are at work."""

import dataclasses
import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.generation import Generated, Stream, _Row, _stop_in, check_prompts, generate, text_after
from megatron_ext.plugins.tasks.sampling import Sampling
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.scripted_model import EOD, logits_of, scripted_model

YES_NO = (False, True)
PROMPTS = [list(text) for text in (b"a", b"bca", b"ab", b"edcbaedc", b"c")]


def _plain(prompt: list[int], sampling: Sampling) -> Generated:
    """Generate by a loop, one token after the other."""
    tokens: list[int] = []
    while True:
        text = [*prompt, *tokens]
        tokens.append(int(logits_of(text[-1], len(text) - 1)[:257].argmax()))
        if tokens[-1] == EOD and not sampling.ignore_eod:
            tokens.pop()
            reason = "eod"
            break
        written = bytes(token for token in tokens if token != EOD).decode()
        if any(stop in written for stop in sampling.stop):
            reason = "stop"
            break
        if len(tokens) == sampling.max_new_tokens:
            reason = "length"
            break
    written = bytes(token for token in tokens if token != EOD).decode()
    ends = [written.index(stop) for stop in sampling.stop if stop in written]
    return Generated(tokens, written[: min(ends)] if ends else written, reason)


@pytest.mark.parametrize("cached", YES_NO)
@pytest.mark.parametrize("ignore_eod", YES_NO)
@pytest.mark.parametrize("stop", [(), ("b",), ("zz", "ca"), ("dd", "a", "cb")])
def test_texts_are_those_of_a_plain_loop(cached: bool, ignore_eod: bool, stop: tuple[str, ...]) -> None:
    """However many prompts are at work at once; and what is told of each token grows by one."""
    for most, rows in ((1, 2), (7, 1), (7, 3), (9, 16)):
        sampling = Sampling(max_new_tokens=most, stop=stop, ignore_eod=ignore_eod)
        told: dict[int, list[list[int]]] = {number: [] for number in range(len(PROMPTS))}
        found = generate(
            scripted_model(),
            PROMPTS,
            sampling,
            rows=rows,
            cached=cached,
            on_token=lambda number, tokens, told=told: told[number].append(tokens),
        )
        expected = [_plain(prompt, sampling) for prompt in PROMPTS]
        assert found == expected
        for number, one in enumerate(expected):
            growing = [one.tokens[:count] for count in range(1, len(one.tokens) + 1)]
            assert told[number] == growing + ([one.tokens] if one.reason == "eod" else [])


def test_draws_do_not_depend_on_how_prompts_are_batched() -> None:
    """By its number and the seed, however the prompts are batched."""
    sampling = Sampling(temperature=0.9, max_new_tokens=6, seed=3, ignore_eod=True)
    together = generate(scripted_model(), PROMPTS, sampling)
    for rows, cached in itertools.product((1, 2, 3), YES_NO):
        assert generate(scripted_model(), PROMPTS, sampling, rows=rows, cached=cached) == together
    others = generate(scripted_model(), PROMPTS, dataclasses.replace(sampling, seed=4))
    assert all(one != other for one, other in zip(together, others, strict=True))
    same = generate(scripted_model(), [PROMPTS[0]] * 4, sampling)
    assert len({tuple(one.tokens) for one in same}) > 1


def test_a_stop_string_is_looked_for_as_far_back_as_its_bytes_go() -> None:
    """A token may be a byte, and a character three of them."""
    stop = "。" * 10
    row = _Row(0, [97], list(f"ab{stop}".encode()))
    assert _stop_in(scripted_model(), row, (stop, "x"))
    row.tokens.pop()
    assert not _stop_in(scripted_model(), row, (stop, "x"))


def test_prompts_and_tokens_must_fit() -> None:
    model, sampling = scripted_model(position_embedding_type="learned_absolute"), Sampling(max_new_tokens=13)
    check_prompts(model, [[1, 2, 3], [0], [256]], sampling)
    with pytest.raises(ConfigurationError) as refused:
        check_prompts(model, [[1, 2, 3, 4], [], [257]], sampling)
    assert [problem.split(";")[0] for problem in refused.value.problems] == [
        "prompt 1 has 4 tokens, and --num-tokens-to-generate is 13: 17 of the model's 16 positions",
        "prompt 2 is empty",
        "prompt 3 has the id 257",
    ]


def test_a_blank_before_the_first_word_is_part_of_the_text() -> None:
    """Tokenizers such as SentencePiece's leave it out where they decode by themselves."""
    model = Tokenizer(models.WordLevel({"\u2581once": 0, "\u2581upon": 1, "\u2581a": 2, "end": 3}, unk_token="end"))
    model.decoder = decoders.Metaspace()
    tokenizer: Any = LibraryTokenizer(model, "end")
    assert tokenizer.decode([1, 2]) == "upon a"
    assert text_after(tokenizer, [0], [1, 2]) == " upon a"
    assert text_after(ByteTokenizer(), list("é".encode()), list("ü".encode())) == "ü"


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
