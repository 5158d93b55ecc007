"""Derives the traits of a torch optimizer class from a few updates of a toy: a matrix and a vector.

    traits = traits_of_class(torch.optim.AdamW)
    traits = traits_of_class(functools.partial(MyOptimizer, momentum=0.95))

Ranks keep any range of a weight, with the state of that range. So the same updates are made over the whole tensors and
over tensors that are cut in two, each half with an optimizer of its own. The class is refused where the two differ, and
where it keeps anything that belongs to no element, and is no number.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch

from megatron_ext.config.derived.optimizer_traits import ALL_SCHEMES, OptimizerTraits, State, StateType
from megatron_ext.errors import ConfigurationError

_SHAPES = ((4, 6), (5,))
_CUTS = (10, 2)
"""Elements of the first half of each tensor; the first cut is within a row."""

_STEPS, _RATE = 3, 0.125
_ROUNDING = 1e-4
"""Largest difference of halves to wholes, as a share of the largest value: vectors of a CPU round otherwise."""

_STATE_TYPES = ("float32", "bfloat16", "float16")
_OWN_TRAITS = "or bring its traits, OptimizerTraits (docs/extending.md, An optimizer)"

Tensors = Sequence[torch.Tensor]


def traits_of_class(given: Any) -> OptimizerTraits:
    """Return the traits of an optimizer class: the states that it keeps, and that every sharding scheme can run it.

    Args:
        given: a class derived from torch.optim.Optimizer, or `functools.partial` of one with keywords.
    Raises:
        ConfigurationError: it is neither; it cannot be made or updates nothing; or ranks that hold parts of weights
            could not do its update, or save what it keeps.
    """
    kind, options = _class_and_options(given)
    name = kind.__name__
    whole, cut = _updated(kind, options, _RATE), _updated(kind, options, _RATE, in_halves=True)
    _require_same(name, whole, cut)
    if all(torch.equal(one, other) for one, other in zip(whole.weights, _updated(kind, options, 0.5).weights)):  # noqa: B905
        _refuse(name, "its update does not depend on `lr` of its parameter groups, which is how a run sets its rate")
    states, scalars = _kept(name, whole)
    begun = _updated(kind, options, 0.0, gradients=0.0, steps=1)
    return OptimizerTraits(
        name=name,
        title=name,
        torch_class=kind,
        arguments={},
        states=tuple(_state(name, state, whole, begun) for state in states),
        schemes=ALL_SCHEMES,
        built_as="adam",
        counts_updates="step" in scalars,
        numbers=tuple(scalar for scalar in scalars if scalar != "step"),
        scalars=scalars,
        reads_weight_decay="weight_decay" in whole.made[0].defaults,
        torch_options=options,
    )


def _class_and_options(given: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class, and the arguments with which it is made."""
    kind, options = given, {}
    if isinstance(given, functools.partial):
        kind, options = given.func, dict(given.keywords)
        if given.args:
            raise ConfigurationError("optimizer= is a partial with positional arguments; give its arguments by name")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        what = kind.__name__ if isinstance(kind, type) else type(kind).__name__
        raise ConfigurationError(
            f"optimizer= is {what}: give the name of an optimizer, a class derived from torch.optim.Optimizer, "
            f"{_OWN_TRAITS}"
        )
    for setting, flag in (("lr", "--lr"), ("weight_decay", "--weight-decay")):
        if setting in options:
            raise ConfigurationError(
                f"optimizer= sets {setting}, which {flag} says in a run; leave {setting} out of it"
            )
    parameters = inspect.signature(kind).parameters
    if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty:
        options["lr"] = _RATE  # a parameter group has its own
    return cast(type[torch.optim.Optimizer], kind), options


class _Updated:
    """The toy after its updates: tensors, and the optimizers that made the updates."""

    def __init__(self, weights: Tensors, made: Sequence[torch.optim.Optimizer], states: Sequence[Mapping[str, Any]]):
        self.weights, self.made, self.states = weights, made, states
        """`states` has the state of each tensor; of a tensor in halves, joined where it is a tensor itself."""


def _updated(
    kind: Any, options: Mapping[str, Any], rate: float, *, gradients: float = 1.0, steps: int = _STEPS, in_halves=False
) -> _Updated:
    """Return the toy after some updates, each with a random gradient times `gradients`."""
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=random) for shape in _SHAPES]
    slopes = [[gradients * torch.randn(shape, generator=random) for shape in _SHAPES] for _ in range(steps)]
    if not in_halves:
        made = _run(kind, options, rate, weights, slopes)
        return _Updated(weights, [made], [made.state[weight] for weight in weights])
    halves = [_halves(weights), *(_halves(each) for each in slopes)]
    made = [_run(kind, options, rate, halves[0][number], [one[number] for one in halves[1:]]) for number in range(2)]
    both = [[one.state[weight] for one, weight in zip(made, of_tensor, strict=True)] for of_tensor in zip(*halves[0])]  # noqa: B905
    joined = [torch.cat([first, second]).view(shape) for first, second, shape in zip(*halves[0], _SHAPES, strict=True)]
    return _Updated(joined, made, [_joined_state(*pair) for pair in both])


def _halves(tensors: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the first halves of the tensors, flat, and the second halves."""
    flat = [(tensor.flatten(), cut) for tensor, cut in zip(tensors, _CUTS, strict=True)]
    return [one[:cut].clone() for one, cut in flat], [one[cut:].clone() for one, cut in flat]


def _joined_state(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of two halves as the state of the whole: flat tensors one after the other."""
    return {
        name: torch.cat([value, second[name]]) if _is_of_elements(value) and name in second else value
        for name, value in first.items()
    }


def _is_of_elements(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _run(kind: Any, options: Mapping[str, Any], rate: float, weights: Tensors, slopes: Any) -> torch.optim.Optimizer:
    """Return an optimizer that has updated the weights, in place. It is made as a run makes it: over other tensors,
    which its groups have in the place of the weights at first."""
    name = kind.__name__
    try:
        made = kind([{"params": [torch.empty(0)], "lr": rate, "weight_decay": 0.0}], **options)
    except Exception as error:
        raise ConfigurationError(
            f"optimizer={name} cannot be made ({type(error).__name__}: {error}); give its arguments by "
            f"functools.partial({name}, ...), {_OWN_TRAITS}"
        ) from error
    if made.state:
        _refuse(name, "it makes its state when it is constructed, when it has no weights yet; make it in step()")
    made.param_groups[0]["params"] = list(weights)
    before = _settings(made), _own_numbers(made)
    for of_step in slopes:
        for weight, slope in zip(weights, of_step, strict=True):
            weight.grad = slope.clone()
        try:
            made.step()
        except Exception as error:
            raise ConfigurationError(
                f"optimizer={name}: its step() fails on a toy, a matrix of {list(weights[0].shape)} and a vector "
                f"({type(error).__name__}: {error}); correct it, {_OWN_TRAITS}"
            ) from error
    for place, was, now in zip(
        ("its parameter groups", "itself"), before, (_settings(made), _own_numbers(made)), strict=True
    ):
        changed = [key for key, value in now.items() if key not in was or was[key] != value]
        if changed:
            _refuse(
                name, f"it keeps {changed[0]!r} in {place}, which no checkpoint holds; keep it in self.state[weight]"
            )
    return made


def _settings(made: torch.optim.Optimizer) -> dict[str, str]:
    return {key: repr(value) for key, value in made.param_groups[0].items() if key != "params"}


def _own_numbers(made: torch.optim.Optimizer) -> dict[str, str]:
    """Return the numbers among an optimizer's attributes."""
    return {key: repr(value) for key, value in vars(made).items() if isinstance(value, int | float | torch.Tensor)}


def _require_same(name: str, whole: _Updated, cut: _Updated) -> None:
    """Raise ConfigurationError where halves are not updated as the whole is."""
    again = [
        (f"{state!r} of its state", one, cut.states[number].get(state))
        for number, of in enumerate(whole.states)
        for state, one in of.items()
    ]
    pairs = [("the weights", one, other) for one, other in zip(whole.weights, cut.weights, strict=True)] + again
    for what, one, other in pairs:
        if torch.is_tensor(one) and torch.is_tensor(other) and one.numel() == other.numel():
            far = (one.flatten().double() - other.flatten().double()).abs().max()
            if far <= _ROUNDING * one.double().abs().max():
                continue
            how = f"by up to {float(far):.1e} of {float(one.double().abs().max()):.1e}"
        elif type(one) is type(other) and not torch.is_tensor(one):
            if one == other or not isinstance(one, int | float):
                continue
            how = f"{one} and {other}"
        else:
            how = "in shape"
        _refuse(
            name,
            f"ranks keep any ranges of a weight, and its update of an element depends on others: {what} differ, {how}, "
            "where a matrix is cut in two",
        )


def _kept(name: str, whole: _Updated) -> tuple[list[str], dict[str, str]]:
    """Return the names of the states, and of each number its type."""
    states, scalars = dict[str, None](), dict[str, str]()
    for weight, state in zip(whole.weights, whole.states, strict=True):
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == weight.shape:
                states[key] = None
            elif torch.is_tensor(value) and value.dim() == 0:
                scalars[key] = str(value.dtype).removeprefix("torch.")
            elif isinstance(value, int | float):
                scalars[key] = type(value).__name__
            elif value is not None:
                shape = f"of shape {list(value.shape)}" if torch.is_tensor(value) else f"of type {type(value).__name__}"
                _refuse(
                    name,
                    f"it keeps {key!r} {shape} for a weight of {list(weight.shape)}, of which no range of the weight "
                    "has a part",
                )
    return list(states), scalars


def _state(name: str, state: str, whole: _Updated, begun: _Updated) -> State:
    """Return one state with its type, and whether it begins as the weight."""
    dtype = str(whole.states[0][state].dtype).removeprefix("torch.")
    if dtype not in _STATE_TYPES:
        _refuse(name, f"it keeps {state!r} in {dtype}; keep it in {', '.join(_STATE_TYPES)}")
    first, weight = begun.states[0][state], begun.weights[0]
    is_weight = torch.equal(first, weight.to(first.dtype))
    if not is_weight and first.count_nonzero():
        _refuse(name, f"{state!r} of its state begins neither as zeros nor as the weight")
    return State(state, dtype=cast(StateType, dtype), begins_as_weight=is_weight)


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigurationError(f"optimizer={name} cannot be divided over ranks: {why}; {_OWN_TRAITS.removeprefix('or ')}")
