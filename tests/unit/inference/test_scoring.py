"""Scores that a model gives are those of a plain loop over a model that is a table, whatever the task."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.parse.eval_tasks import EvalTask
from megatron_ext.errors import ConfigurationError
from megatron_ext.inference import tasks
from megatron_ext.inference.scoring import Scorable, Score, _Scored, score
from megatron_ext.tokenizer.byte import ByteTokenizer
from tests.support.scripted_model import EOD, LETTERS, group_of, logits_of, scripted_model


def test_scores_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of all lengths, of which one token or more are scored."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    letters, drawn = torch.tensor(LETTERS), torch.Generator().manual_seed(7)
    sequences = [
        Scorable(letters[torch.randint(6, (length,), generator=drawn)].tolist(), scored)
        for length, scored in ((2, 1), (5, 4), (9, 2), (3, 1), (12, 11), (9, 8), (2, 1))
    ]
    for begun in sequences[:3]:  # those that the model finds likeliest, too
        tokens = list(begun.tokens[:1])
        while len(tokens) < 6:
            tokens.append(int(logits_of(tokens[-1], len(tokens) - 1)[:257].argmax()))
        sequences.append(Scorable(tokens, 3))
    expected = []
    for one in sequences:
        nats, greedy = 0.0, True
        for place in range(len(one.tokens) - one.scored, len(one.tokens)):
            logits = logits_of(one.tokens[place - 1], place - 1)[:257]
            nats += float(logits.log_softmax(-1)[one.tokens[place]])
            greedy = greedy and int(logits.argmax()) == one.tokens[place]
        expected.append((pytest.approx(nats, rel=1e-6), greedy))
    assert {greedy for _, greedy in expected} == {False, True}
    for rows in (1, 2, 3, 16):
        found = score(scripted_model(), sequences, rows)
        assert [(one.log_likelihood, one.greedy) for one in found] == expected
    assert score(scripted_model(), [], 2) == []


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


def test_every_kind_of_task_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = scripted_model(seq_length=12)
    for kind in ("PERPLEXITY", "LAMBADA", "MULTIPLE_CHOICE"):
        task = EvalTask("t", kind, ("file",))
        prepared = tasks.PreparedTask([Scorable([1, 2], 1)], lambda scores, kind=kind: {kind: len(scores)})
        asked: list[Any] = []
        monkeypatch.setitem(
            tasks._PREPARED, kind, lambda *given, asked=asked, prepared=prepared: asked.append(given) or prepared
        )
        monkeypatch.setattr(
            tasks, "score", lambda model, sequences, rows, asked=asked: asked.append((sequences, rows)) or [1, 2, 3]
        )
        assert tasks.evaluate_task(model, task, 5) == {kind: 3}
        assert asked == [(model.tokenizer, task, 12), (prepared.sequences, 5)]
        with pytest.raises(ConfigurationError, match=f"^{kind} needs the model's tokenizer"):
            tasks.evaluate_task(dataclasses.replace(model, tokenizer=None), task, 5)


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


def test_a_rank_next_to_the_first_of_a_tensor_parallel_group_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a group compute the same scores; the sum over ranks counts them once."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model = scripted_model()
    model.groups.tp = group_of(1, 1)
    found = score(model, [Scorable([97, 98, 99], 2)], 1)
    assert found == [Score(0.0, True)]


def test_the_likeliest_token_of_all_parts_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its part; of equal ones it is the first."""
    parts = [torch.tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 7.0]]), torch.tensor([[9.0, 9.0, 3.0], [7.0, 1.0, 1.0]])]
    model = scripted_model()
    for rank in range(2):
        model.groups.tp = group_of(2, rank)
        reader: Any = object.__new__(_Scored)
        reader._model = model
        own = []

        def gather(into: list[torch.Tensor], given: torch.Tensor, group: Any, own: list[Any] = own) -> None:
            assert group.size() == 2
            own.append(given)
            for number, (one, part) in enumerate(zip(into, parts, strict=True)):
                values, tokens = part.max(-1)
                one.copy_(torch.stack((values.double(), (tokens + 3 * number).double())) if given.dim() == 2 else part)

        monkeypatch.setattr(torch.distributed, "all_gather", gather)
        assert reader._best(parts[rank]).tolist() == [3, 0]
        values, tokens = parts[rank].max(-1)
        assert torch.equal(own[0], torch.stack((values.double(), tokens.double() + 3 * rank)))


def test_the_vocabulary_of_all_ranks_is_in_order_and_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = scripted_model(padded_vocab_size=260)
    model.groups.tp = group_of(2, 1)
    whole = torch.arange(520.0).view(2, 260)

    def gather(into: list[torch.Tensor], given: torch.Tensor, group: Any) -> None:
        for one, part in zip(into, whole.split(130, dim=1), strict=True):
            one.copy_(part)

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    assert torch.equal(model.whole_vocabulary(whole[:, 130:]), whole[:, :257])


def test_the_last_word_may_stand_earlier_too() -> None:
    """And inside of another word; blanks around the text belong to nothing."""
    for text, before, word in (
        ("a cat saw a cat", "a cat saw a", " cat"), ("category: cat", "category:", " cat"), ("  ab  cd \n", "ab", " cd")
    ):  # fmt: skip
        tokens = [*before.encode(), *word.encode()]
        assert tasks._last_word(ByteTokenizer(), "w", text, 100) == Scorable(tokens, len(word))
