"""Which token comes next: from logits written by hand, by sorting, and by the number of a prompt."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.sampling import Sampler, Sampling, check_drafts, narrowed, penalized
from tests.support.small_models import DELTA, LLAMA, small_config


def _drawn_from(logits: list[float], **sampling: Any) -> list[int]:
    scores = narrowed(torch.tensor([logits]), Sampling(**{"temperature": 1.0, **sampling}))
    return [token for token, score in enumerate(scores[0].tolist()) if score != -math.inf]


def test_settings_narrow_the_tokens_that_are_drawn_from() -> None:
    """Of probabilities 1/2, 1/4, 1/8, 1/8."""
    logits = [-math.log(2), -math.log(4), -math.log(8), -math.log(8) - 1e-4]
    assert _drawn_from(logits) == [0, 1, 2, 3]
    assert _drawn_from(logits, top_k=2) == [0, 1]
    assert _drawn_from(logits, top_k=9) == [0, 1, 2, 3]
    assert _drawn_from(logits, top_p=0.6) == [0, 1], "the most likely ones that have as much together"
    assert _drawn_from(logits, top_p=1e-9) == [0], "one is always left"
    assert len(_drawn_from([0.0, 0.0], top_p=0.5)) == 1, "exactly as much is enough"
    assert _drawn_from(logits, min_p=0.4) == [0, 1]
    assert _drawn_from(logits, min_p=1.0) == [0]
    assert _drawn_from(logits, temperature=0.1, min_p=0.1) == [0], "the temperature comes first"


def _kept(scores: Sequence[float], sampling: Sampling) -> set[int]:
    """Return the tokens that are drawn from, by sorting: the likeliest k, of these until p is reached, of these those
    that are likely enough."""
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = order[: sampling.top_k] if sampling.top_k else order

    def probabilities() -> dict[int, float]:
        weights = {token: math.exp(scores[token] / sampling.temperature) for token in kept}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    if sampling.top_p < 1.0:
        together, narrower = 0.0, []
        for token, probability in probabilities().items():
            if together >= sampling.top_p:
                break
            narrower.append(token)
            together += probability
        kept = narrower
    likely = probabilities()
    return {token for token in kept if likely[token] >= sampling.min_p * likely[kept[0]]}


def test_all_settings_together_narrow_as_sorting_does() -> None:
    rows = [[1.0, 3.0, 2.5, -1.0, 0.2, 2.9], [0.1, 0.0, 0.3, 0.2, -0.1, 4.0]]
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.5, 1.0, 2.0), (0, 1, 2, 4, 9), (0.33, 0.77, 1.0), (0.0, 0.15, 0.62, 1.0)
    ):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        found = narrowed(torch.tensor(rows), sampling)
        for row, values in zip(rows, found.tolist(), strict=True):
            assert {token for token, value in enumerate(values) if value > -math.inf} == _kept(row, sampling), sampling
            assert all(
                value in (-math.inf, pytest.approx(row[token] / temperature)) for token, value in enumerate(values)
            )


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


def test_draws_depend_on_the_number_of_the_prompt_and_the_seed() -> None:
    logits = torch.zeros(3, 50)

    def drawn(numbers: list[int], seed: int = 1) -> list[list[int]]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), [[0]] * len(numbers), numbers, 50)
        return torch.stack([sampler.next(logits[: len(numbers)]) for _ in range(4)]).t().tolist()

    first, second, third = drawn([0, 1, 2])
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert drawn([2, 1]) == [third, second]
    assert drawn([0], seed=2) != [first]


REFUSED: list[tuple[dict[str, Any], Sampling, str]] = [
    (LLAMA, Sampling(), "the model has none; leave --speculative out"),
    ({**DELTA, "mtp_num_layers": 1}, Sampling(), "whose state cannot take drafts back; leave --speculative out"),
    ({**LLAMA, "mtp_num_layers": 1}, Sampling(temperature=0.5), "use --temperature 0"),
    ({**LLAMA, "mtp_num_layers": 1}, Sampling(repetition_penalty=1.1), "--repetition-penalty 1"),
]


@pytest.mark.parametrize(("flags", "sampling", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_drafted_is_refused(flags: dict[str, Any], sampling: Sampling, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        check_drafts(small_config(flags), sampling)
    check_drafts(small_config({**LLAMA, "mtp_num_layers": 1}), Sampling())
