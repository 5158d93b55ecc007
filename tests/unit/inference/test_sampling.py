"""Which token comes next, and when a text ends, from logits and tokens written by hand."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.inference import generation
from megatron_ext.inference.generation import _Batch, _dealt, _Row, check_prompts
from megatron_ext.inference.sampling import Sampler, Sampling, narrowed, penalized

EOD = 9


def _kept(logits: list[float], **sampling: Any) -> list[int]:
    scores = narrowed(torch.tensor([logits]), Sampling(**{"temperature": 1.0, **sampling}))
    return [token for token, score in enumerate(scores[0].tolist()) if score != -math.inf]


def test_what_is_drawn_from() -> None:
    """Of probabilities 1/2, 1/4, 1/8, 1/8."""
    logits = [-math.log(2), -math.log(4), -math.log(8), -math.log(8) - 1e-4]
    assert _kept(logits) == [0, 1, 2, 3]
    assert _kept(logits, top_k=2) == [0, 1]
    assert _kept(logits, top_k=9) == [0, 1, 2, 3]
    assert _kept(logits, top_p=0.6) == [0, 1], "the most likely ones that have as much together"
    assert _kept(logits, top_p=1e-9) == [0], "one is always left"
    assert len(_kept([0.0, 0.0], top_p=0.5)) == 1, "exactly as much is enough"
    assert _kept(logits, min_p=0.4) == [0, 1]
    assert _kept(logits, min_p=1.0) == [0]
    assert _kept(logits, temperature=0.1, min_p=0.1) == [0], "the temperature comes first"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": -0.1}, "--temperature -0.1 is below 0"),
        ({"top_k": -1}, "--top-k -1 is below 0"),
        ({"top_p": 0.0}, "--top-p 0.0 is not above 0"),
        ({"top_p": 1.1}, "--top-p 1.1 is not above 0 and at most 1"),
        ({"min_p": -0.1}, "--min-p -0.1 is not between 0 and 1"),
        ({"min_p": 1.1}, "--min-p 1.1 is not between 0 and 1"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0.0 is not above 0"),
        ({"max_new_tokens": 0}, "--num-tokens-to-generate 0 is not positive"),
        ({"stop": ("a", "")}, "--stop has an empty string"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)) as raised:
        Sampling(**values).check()
    assert len(raised.value.problems) == 1


def test_values_at_their_bounds_are_taken() -> None:
    """And all that are wrong are named at once."""
    Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=1, stop=("a",)).check()
    Sampling(temperature=2.0, top_k=1, top_p=0.1, min_p=1.0, repetition_penalty=0.5).check()
    with pytest.raises(ConfigurationError) as raised:
        Sampling(temperature=-1.0, top_k=-1).check()
    assert len(raised.value.problems) == 2


def test_used_tokens_are_made_less_likely_whatever_their_sign() -> None:
    scores = penalized(torch.tensor([[2.0, -2.0, 3.0, -3.0]]), torch.tensor([[True, True, False, False]]), 4.0)
    assert scores.tolist() == [[0.5, -8.0, 3.0, -3.0]]


def test_the_prompt_and_what_was_chosen_count_as_used() -> None:
    """Token 0 was in the prompt; then 1 is best, and after it 2."""
    sampler = Sampler(Sampling(repetition_penalty=2.0), [[0], [3]], [0, 1], 4)
    logits = torch.tensor([[4.0, 3.0, 2.5, 0.0]] * 2)
    assert [sampler.next(logits).tolist() for _ in range(3)] == [[1, 0], [2, 1], [0, 2]]


def test_what_is_drawn_depends_on_the_number_of_the_prompt() -> None:
    logits = torch.zeros(3, 50)

    def drawn(numbers: list[int], seed: int = 1) -> list[list[int]]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), [[0]] * len(numbers), numbers, 50)
        return torch.stack([sampler.next(logits[: len(numbers)]) for _ in range(4)]).t().tolist()

    first, second, third = drawn([0, 1, 2])
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert drawn([2, 1]) == [third, second]
    assert drawn([0], seed=2) != [first]


def _model(replicas: int = 1, replica: int = 0, longest: int | None = None) -> Any:
    return SimpleNamespace(replicas=replicas, replica=replica, vocab_size=10, eod=EOD, tokenizer=None, longest=longest)


def _taken(sampling: Sampling, steps: list[list[int]], prompts: int) -> list[tuple[list[int], str | None]]:
    """Take tokens of two rows, the second of which may be nobody's; what each prompt has in the end, and why."""
    model = _model()
    rows = _dealt([[1, 2], [3]][:prompts], range(prompts), 2, 0)
    batch, heard = _Batch(model, [rows], sampling), {}
    for chosen in steps:
        batch._take(chosen, lambda number, tokens: heard.update({number: tokens}))
        if batch._all_finished():
            break
    assert all(heard[row.number] == row.tokens[: row.ended_at] for row in rows if row.number >= 0)
    return [(row.tokens[: row.ended_at], row.reason) for row in rows if row.number >= 0]


def test_a_text_ends_before_the_end_of_a_document_or_when_it_is_long_enough() -> None:
    sampling = Sampling(max_new_tokens=3)
    assert _taken(sampling, [[4, EOD], [5, 6], [7, 8]], 2) == [([4, 5, 7], "length"), ([], "eod")]
    assert _taken(Sampling(max_new_tokens=3, ignore_eod=True), [[EOD, 1]] * 3, 2) == [
        ([EOD] * 3, "length"),
        ([1] * 3, "length"),
    ]


def test_the_end_of_a_document_counts_wherever_it_comes() -> None:
    """It is the last token that is looked at, of each row by itself."""
    steps = [[4, 5], [5, EOD], [EOD, 7], [8, 8]]
    assert _taken(Sampling(max_new_tokens=5), steps, 2) == [([4, 5], "eod"), ([5], "eod")]


def test_a_row_that_only_goes_along_is_not_waited_for() -> None:
    assert _taken(Sampling(max_new_tokens=3), [[EOD, 4], [5, 6], [7, 8]], 1) == [([], "eod")]
    batch = _Batch(_model(), [_dealt([[1]], range(1), 2, 0)], Sampling())
    batch.rows[0].reason = "eod"
    assert batch._all_finished()


def test_prompts_are_dealt_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1], [2, 2], [3]]
    dealt = [_dealt(prompts, range(3), 2, replica) for replica in range(2)]
    assert [[row.number for row in rows] for rows in dealt] == [[0, 1], [2, -1]]
    assert dealt[1][1].prompt == [1]
    numbers: list[int] = []
    monkeypatch.setattr(
        "megatron_ext.inference.generation.Sampler", lambda sampling, prompts, given, size: numbers.extend(given)
    )
    batch = _Batch(_model(2, 1), dealt, Sampling())
    assert (numbers, batch.longest, batch.together) == ([2, 0], 2, 3)
    assert isinstance(batch.rows[0], _Row)


def test_every_prompt_is_generated_from_once_whatever_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas with two rows each have four prompts at work, then the rest."""
    batches: list[list[list[int]]] = []

    class Batch:
        def __init__(self, model: Any, dealt: list[list[_Row]], sampling: Sampling):
            batches.append([[row.number for row in rows] for rows in dealt])
            self.rows = dealt[model.replica]

        def run(self, cached: bool, on_token: Any) -> None:
            pass

    monkeypatch.setattr(generation, "_Batch", Batch)
    monkeypatch.setattr(generation, "_of_all_replicas", lambda model, made: made)
    monkeypatch.setattr(generation, "_finished", lambda model, row, sampling: row.number)
    model = _model(2, 1)
    model.at_work = nullcontext
    made = generation.generate(model, [[number] for number in range(7)], Sampling(max_new_tokens=1), rows=2)
    assert batches == [[[0, 1], [2, 3]], [[4, 5], [6, -1]]]
    assert made == [2, 3, 6]


def test_prompts_and_tokens_must_fit() -> None:
    model, sampling = _model(longest=8), Sampling(max_new_tokens=5)
    check_prompts(model, [[1, 2, 3], [0], [9]], sampling)
    with pytest.raises(ConfigurationError) as refused:
        check_prompts(model, [[1, 2, 3, 4], [], [10]], sampling)
    assert [problem.split(";")[0] for problem in refused.value.problems] == [
        "prompt 1 has 4 tokens, and --num-tokens-to-generate is 5: 9 of the model's 8 positions",
        "prompt 2 is empty",
        "prompt 3 has the id 10",
    ]
