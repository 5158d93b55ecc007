"""Updates that the device leaves out: weights, averages and counts stay as they are, and all others are the same."""

import copy
from collections.abc import Callable

import pytest
import torch

from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.torch_optimizer import is_maskable, mask_by, torch_optimizer

MASKED = ["adam", "lion"]
Made = tuple[list[torch.nn.Parameter], torch.optim.Optimizer]


def _made(name: str) -> Made:
    torch.manual_seed(1)
    weights = [
        torch.nn.Parameter(torch.randn(5, 7)),
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.empty(0)),
    ]
    return weights, torch_optimizer(OptimizerConfig(optimizer=name, lr=0.1))(
        [{"params": weights, "lr": 0.1, "weight_decay": 0.1, "update": "element"}]
    )


def _update(made: Made, values: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like) -> None:
    for weights in made[0]:
        weights.grad = values(weights)
    made[1].step()


def _all(made: Made) -> list[torch.Tensor]:
    states = [value for weights in made[0] for _, value in sorted(made[1].state[weights].items())]
    return copy.deepcopy([weights.detach() for weights in made[0]] + states)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", MASKED)
def test_a_bad_update_changes_nothing_and_the_next_is_as_if_it_had_not_been(name: str) -> None:
    plain, masked, found_inf = _made(name), _made(name), torch.zeros(())
    mask_by(masked[1], found_inf)
    for step in range(4):
        torch.manual_seed(step)
        _update(plain)
        torch.manual_seed(step)
        _update(masked)
        assert _equal(_all(masked), _all(plain))
        found_inf.fill_(1.0)
        _update(masked, lambda weights: torch.full_like(weights, torch.nan))
        assert _equal(_all(masked), _all(plain))
        found_inf.zero_()


@pytest.mark.parametrize("name", MASKED)
def test_the_state_of_a_first_bad_update_is_that_of_none(name: str) -> None:
    masked, found_inf = _made(name), torch.ones(())
    weights = [one.detach().clone() for one in masked[0]]
    mask_by(masked[1], found_inf)
    _update(masked, lambda one: torch.full_like(one, torch.inf))
    assert _equal(_all(masked)[:3], weights)
    assert all(not value.any() for value in _all(masked)[3:])
    assert len(_all(masked)) > 3


def test_what_counts_on_the_host_or_is_of_another_package_is_not_masked() -> None:
    class OfAPackage(torch.optim.Optimizer):
        """Adam, by its name."""

    settings = {name: OptimizerConfig(optimizer=name) for name in OPTIMIZERS}
    assert {name for name in OPTIMIZERS if is_maskable(_made(name)[1], settings[name])} == set(MASKED)
    short = OptimizerConfig(optimizer="adam", exp_avg_dtype="bf16")
    assert not is_maskable(torch_optimizer(short)(_made("adam")[0]), short)
    assert not is_maskable(OfAPackage(_made("adam")[0], {}), settings["adam"])
