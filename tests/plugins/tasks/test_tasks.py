"""How texts are cut into sequences to score, every token once, and what a task makes of their scores."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.tasks import tasks
from megatron_ext.plugins.tasks.commands.generate import encoder
from megatron_ext.plugins.tasks.eval_tasks import EvalTask
from megatron_ext.plugins.tasks.scoring import Scorable, Score
from megatron_ext.plugins.tasks.tasks import (
    _choice_results,
    _last_word,
    _multiple_choice,
    continuation,
    plain_text,
    prepare_task,
    windows,
)
from megatron_ext.plugins.tasks.tasks_and_samples import Samples, Tasks
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.instructions import write_tokenizer
from tests.support.scripted_model import EOD, scripted_model


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_score_each_token_once(count: int, stride: int) -> None:
    tokens = list(range(count))
    found = list(windows(tokens, 99, 8, stride))
    assert [token for window in found for token in window.tokens[-window.scored :]] == tokens
    assert all(len(window.tokens) <= 9 for window in found)
    assert all(len(window.tokens) == 9 for window in found[1:]), "later windows are given all that there is room for"
    assert found[0].tokens[0] == 99


def test_blanks_before_a_continuation_belong_to_it() -> None:
    found = continuation(ByteTokenizer(), "ab ", "cd", 100, "x")
    assert (bytes(found.tokens), found.scored) == (b"ab cd", 3)
    assert continuation(ByteTokenizer(), "", "cd", 100, "x") == Scorable([256, *b"cd"], 2)
    assert continuation(ByteTokenizer(), " ", "cd", 100, "x") == Scorable([256, *b" cd"], 3)
    assert continuation(ByteTokenizer(), "é", "ü", 100, "x") == Scorable(list("éü".encode()), 2)


def test_a_context_that_is_too_long_loses_its_beginning_and_nothing_that_is_scored() -> None:
    cut = continuation(ByteTokenizer(), "abcdef", "gh", 4, "x")
    assert (bytes(cut.tokens), cut.scored) == (b"defgh", 2)
    assert bytes(continuation(ByteTokenizer(), "abcdef", "ghij", 4, "x").tokens) == b"fghij"
    with pytest.raises(DataError, match=r"a\.jsonl:3: choice 1 has 5 tokens to score, .* given 4 at once"):
        continuation(ByteTokenizer(), "abcdef", "ghijk", 4, "a.jsonl:3: choice 1")
    with pytest.raises(DataError, match="has no token of its own to score"):
        continuation(ByteTokenizer(), "abc", "", 4, "a.jsonl:3: choice 1")


def test_a_token_that_begins_texts_stands_before_whole_ones_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())
    begin = next(token["id"] for token in model["added_tokens"] if token["content"] == "<|im_start|>")
    pieces = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    named = {"<|im_start|>": {"id": "<|im_start|>", "ids": [begin], "tokens": ["<|im_start|>"]}}
    model["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": named}
    (folder / "tokenizer.json").write_text(json.dumps(model))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|im_start|>"}))
    tokenizer = HuggingFaceTokenizer(str(folder))

    word = [token for token in tokenizer.encode(" sum") if token != begin]
    assert tokenizer.encode(" sum") == [begin, *word]
    assert continuation(tokenizer, "", " sum", 100, "x") == Scorable([begin, *word], len(word))
    assert continuation(tokenizer, "", "<|im_start|> sum", 100, "x") == Scorable([begin, *word], len(word))
    assert continuation(tokenizer, "the", " sum", 100, "x") == Scorable([*tokenizer.encode("the"), *word], len(word))
    strict = _last_word(tokenizer, "x", "the sum", 100)
    assert strict == Scorable([*tokenizer.encode("the"), *word], len(word))
    assert plain_text(tokenizer, [begin, *word]) == " sum"
    chat = encoder(scripted_model(tokenizer), "chatml")("the sum")
    assert chat.count(begin) == 2, "of the user and of the answer, which the template has written"


def test_perplexity_begins_a_text_with_the_end_of_a_document(tmp_path: Path) -> None:
    """As training does, whatever token begins a text of a conversation."""
    tokenizer: Any = ByteTokenizer()
    tokenizer.bos = 255
    model = scripted_model(tokenizer, seq_length=8)
    (tmp_path / "text.jsonl").write_text('{"text": "ab"}\n')
    prepared = prepare_task(model, EvalTask("task", "PERPLEXITY", (str(tmp_path / "text.jsonl"),)))
    assert prepared.sequences == [Scorable([256, 97, 98], 2)]


TEXTS = ("a bc d\n", "été x")


def test_perplexity_is_per_token_word_and_byte(tmp_path: Path) -> None:
    """Of all files together; no two of the counts are equal."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    files = tuple(str(tmp_path / f"{number}.txt") for number in range(2))
    made = {
        stride: tasks.prepare_task(scripted_model(seq_length=4), EvalTask("t", "PERPLEXITY", files, stride))
        for stride in (None, 1, 3, 4, 9)
    }
    for stride, task in made.items():
        expected = []
        for text in TEXTS:
            whole, done = [EOD, *text.encode()], 0
            while done < len(whole) - 1:
                until = min(done + (min(stride or 4, 4) if done else 4), len(whole) - 1)
                expected.append(Scorable(whole[max(0, until - 4) : until + 1], until - done))
                done = until
        assert list(task.sequences) == expected
        assert sum(one.scored for one in task.sequences) == 14
    scores = [Score(-1.0 - number, greedy=False) for number in range(4)]
    nats, tokens, words, size = 10.0, 14, 5, 14
    assert made[None].results(scores) == {
        "loss": nats / tokens, "perplexity": math.exp(nats / tokens), "word_perplexity": math.exp(nats / words),
        "byte_perplexity": math.exp(nats / size), "bits_per_byte": nats / size / math.log(2),
        "tokens": tokens, "words": words, "bytes": size,
    }  # fmt: skip


def test_choices_of_questions_with_unequal_numbers_of_them(tmp_path: Path) -> None:
    """Scores in the order of the choices of all files; what is likeliest as it is, and by the character."""
    lines = (
        '{"prompt": "p ", "choices": ["aa", "b"], "answer": 0}\n{"prompt": "q", "choices": ["c", "dd", "e"], '
        '"answer": "e"}\n',
        '{"prompt": "", "choices": ["ffff", "g"], "answer": 1}\n',
    )
    for number, text in enumerate(lines):
        (tmp_path / f"{number}.jsonl").write_text(text)
    files = tuple(str(tmp_path / f"{number}.jsonl") for number in range(2))
    task = tasks.prepare_task(scripted_model(), EvalTask("t", "MULTIPLE_CHOICE", files))
    assert list(task.sequences) == [
        Scorable(list(b"p aa"), 3), Scorable(list(b"p b"), 2),
        Scorable(list(b"qc"), 1), Scorable(list(b"qdd"), 2), Scorable(list(b"qe"), 1),
        Scorable([EOD, *b"ffff"], 4), Scorable([EOD, *b"g"], 1),
    ]  # fmt: skip
    scores = [Score(value, greedy=False) for value in (-3.0, -2.0, -5.0, -6.0, -4.0, -4.0, -3.0)]
    # As they are: b, e, g. By the character: aa (1.5), dd (3), ffff (1).
    assert task.results(scores) == {
        "accuracy": 2 / 3, "accuracy_normalized": 1 / 3, "correct": 2, "correct_normalized": 1, "items": 3
    }  # fmt: skip


@pytest.mark.parametrize(("strict", "scored"), [(False, 1), (True, 4)])
def test_the_last_token_or_the_last_word_is_scored(strict: bool, scored: int, tmp_path: Path) -> None:
    texts = ("one two", "of all")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    files = tuple(str(tmp_path / f"{number}.jsonl") for number in range(2))
    task = tasks.prepare_task(scripted_model(), EvalTask("t", "LAMBADA", files, strict_lambada=strict))
    assert list(task.sequences) == [Scorable(list(text.encode()), scored) for text in texts]
    assert task.results([Score(-1.0, greedy=True), Score(-4.0, greedy=False)]) == {
        "accuracy": 0.5, "perplexity": math.exp(2.5), "correct": 1, "items": 2
    }  # fmt: skip


def test_the_last_word_may_stand_earlier_too() -> None:
    """And inside of another word; blanks around the text belong to nothing."""
    for text, before, word in (
        ("a cat saw a cat", "a cat saw a", " cat"), ("category: cat", "category:", " cat"), ("  ab  cd \n", "ab", " cd")
    ):  # fmt: skip
        tokens = [*before.encode(), *word.encode()]
        assert tasks._last_word(ByteTokenizer(), "w", text, 100) == Scorable(tokens, len(word))


def test_choices_are_compared_by_the_character() -> None:
    """The first has three characters in five bytes: by its bytes it would be the likeliest."""
    scores = [Score(-3.3, greedy=False), Score(-4.0, greedy=False)]
    found = _choice_results([(["éaé", "abcd"], 0)], scores)
    assert (found["correct"], found["correct_normalized"]) == (1, 0)


def _questions(folder: Path, **item: Any) -> EvalTask:
    line = {"prompt": "Is it so?", "choices": [" yes", " no"], "answer": 0, **item}
    (folder / "questions.jsonl").write_text(json.dumps(line))
    return EvalTask("asked", "MULTIPLE_CHOICE", (str(folder / "questions.jsonl"),))


@pytest.mark.parametrize("answer", [True, False, -1, 2, 1.0, "yes", None])
def test_an_answer_that_is_no_choice_is_refused(answer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"answer is {answer!r}; give the number of a choice, from 0")):
        _multiple_choice(ByteTokenizer(), _questions(tmp_path, answer=answer), 64)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_choice_that_is_too_long_is_named_by_its_number(wrong: int, tmp_path: Path) -> None:
    """Choices are numbered as answers are: from 0."""
    choices = [" yes", " no"]
    choices[wrong] = " maybe" * 20
    with pytest.raises(DataError, match=f"choice {wrong} has 120 tokens to score, and the model is given 64"):
        _multiple_choice(ByteTokenizer(), _questions(tmp_path, choices=choices), 64)


ITEMS = {
    "LAMBADA": '{"text": "abc defgh"}',
    "MULTIPLE_CHOICE": '{"prompt": "abc", "choices": ["d", "e"], "answer": 0}',
    "PERPLEXITY": '{"text": "abc"}',
}


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        ("LAMBADA", '{"text": "a"}', r"items\.jsonl:2: a text of 1 "),
        ("LAMBADA", '{"text": 5}', r"items\.jsonl:2: text is int, not a text$"),
        ("LAMBADA", None, r"items\.jsonl: no line; give objects with a text$"),
        ("MULTIPLE_CHOICE", '{"prompt": "abc", "choices": ["d", "efghijklm"], "answer": 0}', r"s\.jsonl:2: choice 1 "),
        ("MULTIPLE_CHOICE", '{"prompt": "abc", "choices": ["d"], "answer": 0}', r"s\.jsonl:2: .* at least two texts$"),
        ("MULTIPLE_CHOICE", None, r"items\.jsonl: no line; give objects with prompt, choices and answer$"),
        ("PERPLEXITY", '{"txt": "d"}', r"items\.jsonl:2: no text"),
        ("PERPLEXITY", '{"text"', r"items\.jsonl:2: .*; a line must be one JSON object$"),
        ("PERPLEXITY", None, r"items\.jsonl: no token to predict; give a text that is not empty$"),
    ],
)
def test_items_that_cannot_be_used_are_named_before_the_first_step(
    kind: str, wrong: str | None, said: str, tmp_path: Path
) -> None:
    model = scripted_model(seq_length=8)
    path = tmp_path / "items.jsonl"
    task = EvalTask("task", kind, (str(path),))
    path.write_text(ITEMS[kind] + "\n\n")
    Tasks(model, [task], 1)
    path.write_text("" if wrong is None else f"{ITEMS[kind]}\n{wrong}")
    with pytest.raises(DataError, match=said):
        Tasks(model, [task], 1)


def test_a_text_has_two_words_where_the_last_one_is_scored() -> None:
    with pytest.raises(DataError, match=r"^a\.jsonl:3: a text of 1 words has no last one"):
        tasks._last_word(ByteTokenizer(), "a.jsonl:3", " word ", 8)


def test_prompts_that_cannot_be_used_are_named_before_the_first_step() -> None:
    model = scripted_model(position_embedding_type="learned_absolute", max_position_embeddings=8)
    Samples(model, ["abc"], 1, 5)
    assert Samples(model, ["", "a"], 1, 5)._ids == [[256], [97]], "nothing is the end of a document"
    with pytest.raises(ConfigurationError, match="prompt 2 has 4 tokens"):
        Samples(model, ["abc", "abcd"], 1, 5)
    with pytest.raises(ConfigurationError, match="no prompt"):
        Samples(model, [], 1, 5)


@pytest.mark.parametrize("kind", ["PERPLEXITY", "LAMBADA", "MULTIPLE_CHOICE"])
def test_a_task_needs_the_models_tokenizer(kind: str) -> None:
    model = dataclasses.replace(scripted_model(), tokenizer=None)
    with pytest.raises(ConfigurationError, match=f"^{kind} needs the model's tokenizer"):
        prepare_task(model, EvalTask("t", kind, ("file",)))
