"""What remembers which gradients were bad before they were reduced, on parameters made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.train import gradient_watch
from megatron_ext.train.gradient_watch import Evidence, GradientWatch

FIRST, LAST = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"


def _watch(loss: torch.Tensor | None = None, *, alone: bool = False) -> tuple[Any, Evidence]:
    watch: Any = GradientWatch([], SimpleNamespace(), (), alone=alone)  # pyright: ignore[reportArgumentType]
    watch._places = {FIRST: (0, 1), LAST: (1, 1)}
    return watch, watch.begin(torch.tensor(1.0) if loss is None else loss)


def _bucket(watch: Any, gradients: dict[str, torch.Tensor]) -> list[Any]:
    parameters = [SimpleNamespace(main_grad=gradient) for gradient in gradients.values()]
    watch._names = {id(parameter): name for parameter, name in zip(parameters, gradients, strict=True)}
    return parameters


def test_a_norm_that_16_bits_cannot_hold_is_no_bad_gradient() -> None:
    """300 times the root of 100,000 is beyond 65,504, the largest number of fp16."""
    watch, evidence = _watch()
    watch.before_reduction(_bucket(watch, {FIRST: torch.full((100_000,), 300.0, dtype=torch.float16)}))
    assert watch.diagnose(evidence) is None


def test_the_last_bad_one_in_the_order_of_a_forward_pass_is_the_cause() -> None:
    watch, evidence = _watch()
    bad = torch.tensor([1.0, torch.nan, torch.inf, torch.nan])
    watch.before_reduction(_bucket(watch, {LAST: bad, FIRST: torch.full((3,), torch.nan)}))
    assert watch.diagnose(evidence) == ((1, 1), f"2 NaN and 1 infinite values in the gradient of {LAST}")
    assert watch.in_reduced_gradients(zip(_bucket(watch, {FIRST: bad, LAST: bad}), [bad, bad], strict=True)) == (
        (1, 1),
        f"2 NaN and 1 infinite values in the reduced gradient of {LAST}",
    )


def test_a_bad_gradient_of_an_earlier_microbatch_is_remembered_and_forgotten_with_its_step() -> None:
    (watch, evidence), weight = _watch(), torch.ones(2, requires_grad=True)
    watch.watch(FIRST, weight)
    for factor in (torch.nan, 1.0):
        (weight * factor).sum().backward()
        weight.grad = None
    assert watch.diagnose(evidence) == ((0, 1), f"NaN or infinite values in the gradient of {FIRST}")
    after = watch.begin(torch.tensor(1.0))
    (weight * 1.0).sum().backward()
    assert watch.diagnose(after) is None


def test_a_step_is_told_of_when_the_next_one_has_its_gradients() -> None:
    """Norms are kept, but what is counted would be the next step's."""
    watch, evidence = _watch()
    parameters = _bucket(watch, {LAST: torch.tensor([torch.nan, 1.0])})
    watch.before_reduction(parameters)
    after = watch.begin(torch.tensor(1.0))
    parameters[0].main_grad = torch.ones(2)
    watch.before_reduction(parameters)
    assert watch.diagnose(evidence) == ((1, 1), f"NaN or infinite values in the gradient of {LAST}")
    assert watch.diagnose(after) is None
    assert (watch.is_of_these_gradients(evidence), watch.is_of_these_gradients(after)) == (False, True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_loss_comes_after_everything(bad: float) -> None:
    loss = torch.tensor(0.0)
    watch, evidence = _watch(loss)
    loss.fill_(bad)  # written when the forward passes are done
    watch.before_reduction(_bucket(watch, {LAST: torch.full((3,), torch.nan)}))
    found = watch.diagnose(evidence)
    assert found is not None
    assert found.text == "NaN or infinity in the loss"
    assert found.position > (1, 1)


def test_a_rank_that_is_alone_reads_gradients_when_they_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    (watch, evidence), taken = _watch(alone=True), []
    norms = gradient_watch._norms
    monkeypatch.setattr(gradient_watch, "_norms", lambda parameters: taken.append(1) or norms(parameters))
    parameters = _bucket(watch, {FIRST: torch.tensor([1.0, torch.nan]), LAST: torch.ones(2)})
    watch.before_reduction(parameters)
    assert not taken
    assert watch.diagnose(evidence) == ((0, 1), f"1 NaN and 0 infinite values in the gradient of {FIRST}")
    assert len(taken) == 1


def test_a_rank_that_is_alone_is_told_the_norms_of_a_step_that_is_over() -> None:
    watch, evidence = _watch(alone=True)
    parameters = _bucket(watch, {FIRST: torch.ones(2), LAST: torch.ones(2)})
    watch.before_reduction(parameters)
    watch.take_norms(parameters, torch.tensor([1.0, torch.nan]))
    after = watch.begin(torch.tensor(1.0))
    watch.before_reduction(parameters)
    assert watch.diagnose(evidence) == ((1, 1), f"NaN or infinite values in the gradient of {LAST}")
    assert watch.diagnose(after) is None


def test_replayed_norms_are_those_of_their_own_step() -> None:
    watch, _ = _watch()
    parameters = _bucket(watch, {FIRST: torch.ones(2), LAST: torch.full((2,), 2.0)})
    watch.before_reduction(parameters)
    seen = watch.seen()
    [(_, norms)] = seen.norms
    taken = []
    for number in range(2):  # steps whose hooks nobody calls
        taken.append(watch.begin(torch.tensor(1.0)))
        for norm in norms:
            norm.fill_(torch.nan if number == 0 else 1.0)
        watch.see_again(seen)
    assert watch.diagnose(taken[0]) == ((1, 1), f"NaN or infinite values in the gradient of {LAST}")
    assert watch.diagnose(taken[1]) is None


def test_a_replay_of_a_rank_that_is_alone_says_whose_gradients_there_are() -> None:
    watch, _ = _watch(alone=True)
    parameters = _bucket(watch, {FIRST: torch.ones(2), LAST: torch.ones(2)})
    watch.before_reduction(parameters)
    seen = watch.seen()
    after = watch.begin(torch.tensor(1.0))
    watch.see_again(seen)
    parameters[1].main_grad = torch.tensor([1.0, torch.inf])
    assert watch.diagnose(after) == ((1, 1), f"0 NaN and 1 infinite values in the gradient of {LAST}")


def test_norms_of_an_update_tell_nothing_where_other_ranks_have_had_a_part_in_it() -> None:
    """A gradient that is mixed would blame every rank of the group."""
    for alone in (True, False):
        watch, evidence = _watch(alone=alone)
        parameters = _bucket(watch, {FIRST: torch.ones(2), LAST: torch.ones(2)})
        watch.take_norms(parameters, torch.tensor([1.0, torch.nan]))
        watch.take_norms(parameters, None)
        assert [[float(norm) for norm in norms] for _, norms in evidence.norms] == (
            [[1.0, pytest.approx(float("nan"), nan_ok=True)]] if alone else []
        )


def test_a_later_steps_gradients_are_not_counted_for_this_one() -> None:
    """Both are bad, of other numbers."""
    watch, evidence = _watch()
    parameters = _bucket(watch, {LAST: torch.tensor([torch.nan, 1.0])})
    watch.before_reduction(parameters)
    watch.begin(torch.tensor(1.0))
    parameters[0].main_grad = torch.tensor([torch.inf, torch.nan])
    assert watch.diagnose(evidence) == ((1, 1), f"NaN or infinite values in the gradient of {LAST}")


def test_a_step_that_is_like_another_is_not_that_step() -> None:
    loss = torch.tensor(1.0)
    watch, evidence = _watch(loss)
    after = watch.begin(loss)
    assert (watch.is_of_these_gradients(evidence), watch.is_of_these_gradients(after)) == (False, True)


def test_a_rank_that_is_alone_forgets_whose_gradients_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without any reduction, as one that is replayed, has only those of its own."""
    watch, _ = _watch(alone=True)
    watch.before_reduction(_bucket(watch, {FIRST: torch.full((2,), torch.nan)}))
    after = watch.begin(torch.tensor(1.0))
    assert watch.diagnose(after) is None


def test_a_gradient_is_seen_before_a_wrapper_takes_it_away() -> None:
    """Whose hook was there first."""
    (watch, evidence), weight = _watch(), torch.ones(2, requires_grad=True)
    taken: list[torch.Tensor] = []

    def take(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        taken.append(weight.grad)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(take)
    watch.watch(FIRST, weight)
    for factor in (torch.inf, 2.0):
        (weight * factor).sum().backward()
    assert [one.tolist() for one in taken] == [[torch.inf] * 2, [2.0] * 2]
    assert watch.diagnose(evidence) == ((0, 1), f"NaN or infinite values in the gradient of {FIRST}")
