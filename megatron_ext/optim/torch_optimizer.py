"""torch's optimizers, as config/derived/optimizers.py registers them.

What optimizers of ours have in common: every tensor is updated by itself.
"""

import importlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron_ext.config.derived.optimizer_traits import OptimizerTraits
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.errors import ConfigurationError, listed
from megatron_ext.parallel.matrices import matrix_of

Group = dict[str, Any]
"""A parameter group of torch."""

_OF_EVERY_OPTIMIZER = ("lr", "weight_decay")


def torch_optimizer(settings: OptimizerConfig) -> Any:
    """Return the constructor of the torch optimizer of the settings; it takes parameters or parameter groups."""
    traits = traits_of(settings)
    return (
        _alone(traits, settings) if traits.of_elements is None else partial(Together, traits=traits, settings=settings)
    )


def _alone(traits: OptimizerTraits, settings: OptimizerConfig) -> Any:
    """Return the constructor of one of the torch optimizers of a run."""
    make = partial(_torch_class(traits), **traits.values(settings), **traits.torch_options)
    if traits.is_the_engines:
        return make
    names = traits_of(settings).state_names(settings)

    def made(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = make(*arguments, **options)
        optimizer.register_step_post_hook(lambda stepped, *_: _require_named_states(stepped, traits, names))
        return optimizer

    return made


def _require_named_states(optimizer: torch.optim.Optimizer, traits: OptimizerTraits, names: Sequence[str]) -> None:
    """Raise ConfigurationError where the first tensor has a state that no checkpoint would hold. Scalars are no state:
    counts and `OptimizerTraits.numbers`."""
    state = next((kept for kept in optimizer.state.values() if kept), {})
    unnamed = [name for name, kept in state.items() if name not in names and torch.is_tensor(kept) and kept.dim()]
    if unnamed:
        raise ConfigurationError(
            f"the optimizer {traits.name!r} keeps the state {listed(map(repr, unnamed))}, which its traits do not "
            f"name, so that no checkpoint would hold it; add State({unnamed[0]!r}) to states= of its traits"
        )


def is_torchs(optimizer: torch.optim.Optimizer | None, settings: OptimizerConfig) -> bool:
    """Return whether `torch_optimizer` made it, and it is not Transformer Engine's or apex's of the same name."""
    traits = traits_of(settings)
    return isinstance(optimizer, _torch_class(traits) if traits.of_elements is None else Together)


def is_maskable(optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> bool:
    """Return whether `mask_by` works. It does not with an optimizer of another package."""
    return all(traits.can_be_masked for traits in traits_of(settings).each) and is_torchs(optimizer, settings)


def mask_by(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Have every later update change nothing while `found_inf`, an fp32 scalar on the device, is 1 and not 0.

    The optimizer `is_maskable`.
    """
    optimizer.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue] (the name that torch's scaler sets)


def over(groups: Sequence[Group], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the torch optimizer of the settings over groups as they are.

    Their tensors may be views, which torch refuses.
    """
    made = torch_optimizer(settings)([{**group, "params": [torch.empty(0)]} for group in groups])
    for filled, group in zip(made.param_groups, groups, strict=True):
        filled["params"] = group["params"]
    return made


def as_registered(built: torch.optim.Optimizer, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer to use in place of one that megatron-core has built and not yet used.

    The result is `built` itself, with our options for torch's optimizers, or, where megatron-core does not have the
    optimizer of the settings, ours over the same groups, without the options that belong to `built`. Groups with a
    factor of epsilon have it multiplied in.
    """
    traits = traits_of(settings)
    if not traits.is_the_engines:
        built = over([_without_its_own(group, built) for group in built.param_groups], settings)
    elif is_torchs(built, settings):
        for group in built.param_groups:
            group |= traits.torch_options
    for group in built.param_groups:
        if "eps" in group:
            group["eps"] *= group.get("eps_mult", 1.0)
    return built


def begin_state(main: torch.Tensor, group: Group, optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> None:
    """Give `main` the state that it lacks of the settings' optimizer, as the first update begins from it.

    Args:
        group: the parameter group of `main`.
    """
    traits, state = traits_of(settings).updating(group.get("update")), optimizer.state[main]
    for kept in traits.kept(settings):
        if state.get(kept.name) is None:
            dtype = getattr(torch, kept.dtype)
            like = main if kept.along is None else in_shape(main).sum(kept.along, keepdim=True)
            state[kept.name] = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
            if kept.begins_as_weight:
                state[kept.name].copy_(main.detach())
    if traits.counts_updates and is_torchs(optimizer, settings) and "step" not in state:
        # Where torch itself puts it (_init_group of torch/optim/adam.py).
        on_device = group.get("fused") or group.get("capturable")
        state["step"] = scalar(traits, "step", 0.0, main.device if on_device else None)


def scalar(traits: OptimizerTraits, name: str, value: float, device: torch.device | None = None) -> Any:
    """Return the count "step", or a number, of an optimizer as its class keeps it."""
    kept_as = traits.scalars.get(name, "float32" if name == "step" else "float64")
    if kept_as in ("int", "float"):
        return int(value) if kept_as == "int" else value
    return torch.tensor(value, dtype=getattr(torch, kept_as), device=device)


def in_shape(main: torch.Tensor) -> torch.Tensor:
    """Return the updated part of a matrix, which may be a flat range, as rows: [rows, ...]."""
    return main.detach().view(-1, *matrix_of(main).shape[1:])


class Together(torch.optim.Optimizer):
    """Optimizers of torch as one of them: each updates the parameter groups whose `update` says that they are its own.

    This object owns groups and states, whoever replaces them; states keep the shapes of the updated tensors.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, groups: Any, traits: OptimizerTraits, settings: OptimizerConfig):
        super().__init__(groups, {})
        self._traits = traits
        self._optimizers = {one.name: _alone(one, settings)(own) for one in traits.each if (own := self._groups(one))}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every tensor that has a gradient."""
        for traits in self._traits.each:
            if groups := self._groups(traits):
                optimizer: Any = self._optimizers[traits.name]
                optimizer.param_groups, optimizer.state = groups, self.state
                if self.found_inf is not None:
                    optimizer.found_inf = self.found_inf
                if traits.needs_whole_matrices:
                    _step_in_shape(optimizer)
                else:
                    optimizer.step()

    def _groups(self, traits: OptimizerTraits) -> list[Group]:
        return [group for group in self.param_groups if self._traits.updating(group["update"]) is traits]


def _step_in_shape(optimizer: torch.optim.Optimizer) -> None:
    """Take a step over matrices, which may be kept as flat ranges, viewed as rows."""
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = [], defaultdict(dict)
    whole: dict[torch.Tensor, Any] = {}
    for group in groups:
        for main in group["params"]:
            whole[main] = in_shape(main)
            shape = whole[main].shape
            whole[main].grad = None if main.grad is None else main.grad.view(shape)
            whole[main].matrix = main.matrix
            optimizer.state[whole[main]] = {
                name: kept.view(shape) if kept.shape == main.shape else kept for name, kept in state[main].items()
            }
        optimizer.param_groups.append({**group, "params": [whole[main] for main in group["params"]]})
    optimizer.step()
    for main, matrix in whole.items():
        kept = optimizer.state[matrix].items()
        state[main] = {name: own.view(main.shape) if own.shape == matrix.shape else own for name, own in kept}


def _without_its_own(group: Group, built: torch.optim.Optimizer) -> Group:
    """Return the group without the arguments of the optimizer that it was made for."""
    return {name: value for name, value in group.items() if name in _OF_EVERY_OPTIMIZER or name not in built.defaults}


def _torch_class(traits: OptimizerTraits) -> type[torch.optim.Optimizer]:
    if isinstance(traits.torch_class, type):
        return traits.torch_class
    module, _, name = traits.torch_class.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the text is empty
        raise ConfigurationError(
            f"the optimizer {traits.name!r} has torch_class={traits.torch_class!r}, which cannot be imported "
            f"({error}); name it 'module:Class'"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigurationError(
            f"the optimizer {traits.name!r} has torch_class={traits.torch_class!r}, which is no class derived from "
            "torch.optim.Optimizer; name one that is"
        )
    return found


class ByTensor(torch.optim.Optimizer):
    """An optimizer that updates one tensor after another, in `_update`."""

    found_inf: torch.Tensor | None = None
    """Scalar on the device, where the states are, too; while it is 1, an update changes nothing. None: every update is
    made."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every tensor that has a gradient.

        Args:
            closure: computes the loss and the gradients anew, which are then used.
        Returns:
            What the closure returns; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                if self.found_inf is None:
                    self._update(weights, weights.grad, group)
                else:
                    self._masked_update(weights, weights.grad, group, self.found_inf > 0)
        return loss

    def _masked_update(
        self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], leave_out: torch.Tensor
    ) -> None:
        """Update, and restore the earlier values where `leave_out`; a state that begins is 0 then."""
        before = {name: kept.clone() for name, kept in self.state[weights].items()}
        weights_before = weights.clone()
        self._update(weights, gradient, group)
        weights.copy_(torch.where(leave_out, weights_before, weights))
        for name, kept in self.state[weights].items():
            kept.copy_(torch.where(leave_out, before.get(name, torch.zeros_like(kept)), kept))

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError
