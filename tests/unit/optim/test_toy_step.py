"""A class of torch.optim.Optimizer is taken by what a toy shows of it, or refused with the reason."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.optimizer_traits import FULL_ADAM, State
from megatron_ext.errors import ConfigurationError
from megatron_ext.optim.toy_step import traits_of_class


class Own(torch.optim.Optimizer):
    """Momentum that counts its updates, and does `more` at each."""

    def __init__(self, params: Any, lr: float, more: Callable[..., Any] = lambda *_: None) -> None:
        super().__init__(params, {"lr": lr})
        self.more = more

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                if not state:
                    state |= {"step": 0, "momentum": torch.zeros_like(weights)}
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(weights.grad)
                weights.sub_(group["lr"] * state["momentum"])
                self.more(self, group, weights, state)


def test_the_traits_of_torchs_adam_are_those_of_the_registered_one() -> None:
    traits = traits_of_class(torch.optim.AdamW)
    assert (traits.states, traits.counts_updates, traits.schemes) == (
        FULL_ADAM.states,
        FULL_ADAM.counts_updates,
        FULL_ADAM.schemes,
    )
    assert (traits.scalars, traits.reads_weight_decay) == ({"step": "float32"}, True)


def test_arguments_decide_what_is_kept() -> None:
    assert traits_of_class(torch.optim.SGD).states == ()
    assert traits_of_class(functools.partial(torch.optim.SGD, momentum=0.9)).states == (State("momentum_buffer"),)
    average = traits_of_class(
        functools.partial(Own, more=lambda own, group, weights, state: state.setdefault("slow", weights.clone()))
    )
    assert not average.reads_weight_decay
    assert average.scalars == {"step": "int"}
    assert traits_of_class(torch.optim.NAdam).numbers == ("mu_product",)


def test_a_state_that_begins_as_the_weight_is_known() -> None:
    def follow(own: Any, group: Any, weights: torch.Tensor, state: Any) -> None:
        state.setdefault("slow", weights.clone()).lerp_(weights, 0.1)

    states = traits_of_class(functools.partial(Own, more=follow)).states
    assert states == (State("momentum"), State("slow", begins_as_weight=True))


def _scaled_by_norm(own: Any, group: Any, weights: torch.Tensor, state: Any) -> None:
    weights.mul_(1.0 - 0.01 * weights.norm())


def _of_rows(own: Any, group: Any, weights: torch.Tensor, state: Any) -> None:
    state["rows"] = weights.new_zeros(len(weights))


def _counts_in_group(own: Any, group: Any, weights: torch.Tensor, state: Any) -> None:
    group["k"] = group.get("k", 0) + 1


def _counts_itself(own: Any, group: Any, weights: torch.Tensor, state: Any) -> None:
    own.count = getattr(own, "count", 0) + 1


def _keeps_a_list(own: Any, group: Any, weights: torch.Tensor, state: Any) -> None:
    state["past"] = [1, 2]


def _of_integers(own: Any, group: Any, weights: torch.Tensor, state: Any) -> None:
    state["signs"] = weights.sign().to(torch.int8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (_scaled_by_norm, "its update of an element depends on others: the weights differ"),
        (_of_rows, "rows"),
        (_counts_in_group, "it keeps 'k' in its parameter groups, which no checkpoint holds"),
        (_counts_itself, "it keeps 'count' in itself, which no checkpoint holds"),
        (_keeps_a_list, "it keeps 'past' of type list"),
        (_of_integers, "it keeps 'signs' in int8"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_reason(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^optimizer=Own cannot be divided over ranks: ") as caught:
        traits_of_class(functools.partial(Own, more=given))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.optim.Adafactor, "its update of an element depends on others"),
        (torch.optim.Adagrad, "it makes its state when it is constructed"),
        (torch.optim.LBFGS, "its step\\(\\) fails on a toy"),
        (torch.optim.Muon, "cannot be made \\(ValueError: Muon only supports 2D"),
        (functools.partial(torch.optim.SGD, lr=1.0), "sets lr, which --lr says in a run"),
        (functools.partial(torch.optim.SGD, [], 1.0), "positional arguments"),
        (int, "optimizer= is int: give the name of an optimizer"),
        (len, "optimizer= is builtin_function_or_method"),
    ],
)
def test_what_is_no_such_class_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        traits_of_class(given)
