"""Remembers whether this rank's own gradients were finite before they were mixed with those of other ranks.

After the reduction every data-parallel rank holds the same NaN and nobody can say whose it was. So each gradient's norm
is taken just before its reduction (one pass, no synchronization with the host); only when the gradients that the update
would use turn out bad are those norms read.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from megatron_ext.model.names import AFTER_ALL, forward_place, global_named_parameters
from megatron_ext.resilience.numeric import BadTensor, first_bad
from megatron_ext.sharding.protocol import Sharding


class Finding(NamedTuple):
    """Says what a rank found wrong."""

    place: tuple[int, int]
    """Place in the order of a forward pass. NaN spreads backward, so that of all findings the last one is the cause."""

    text: str


class GradientWatch:
    """Watches every local gradient of a step, and names the first that is NaN or infinite."""

    def __init__(self, chunks: Sequence[_BaseDataParallel], sharding: Sharding):
        self._names: dict[int, str] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._norms: list[tuple[Sequence[Any], Sequence[torch.Tensor]]] = []
        self._sums_by_name: dict[str, torch.Tensor] = {}
        self._loss: torch.Tensor | None = None
        for chunk in chunks:
            sharding.watch(chunk, self)

    def reset(self, loss: torch.Tensor) -> None:
        """Forget the last step.

        Args:
            loss: this rank's part of the loss of the step that begins, a scalar on the device to be written later.
        """
        self._norms.clear()
        self._sums_by_name.clear()
        self._loss = loss

    def diagnose(self) -> Finding | None:
        """Return the cause, as far as this rank can tell from its own loss and its gradients before any reduction."""
        if self._loss is not None and not bool(torch.isfinite(self._loss)):
            return Finding(AFTER_ALL, "NaN or infinity in the loss")
        return max((*self._bad_in_buckets(), *self._bad_by_name()), default=None)

    def in_reduced_gradients(self, gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> Finding | None:
        """Return the last bad one of the gradients that an update would use, each with its parameter of the model."""
        named = [(self._names[id(parameter)], gradient) for parameter, gradient in gradients]
        bad = first_bad(sorted(named, key=lambda pair: self._places[pair[0]], reverse=True))
        return bad and Finding(self._places[bad.name], f"{_counted(bad)} the reduced gradient of {bad.name}")

    def register(self, chunk: _BaseDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
        """Learn the parameters of `chunk`, and return them with their global names."""
        parameters = list(global_named_parameters([chunk]))
        for name, parameter in parameters:
            self._names[id(parameter)] = name
            self._places[name] = forward_place(name, parameter)
        return parameters

    def _bad_in_buckets(self) -> Iterator[Finding]:
        for parameters, norms in self._norms:
            finite: list[bool] = torch.stack([*norms]).isfinite().tolist()
            for parameter, is_finite in zip(parameters, finite, strict=True):
                if is_finite:
                    continue
                name, gradient = self._names[id(parameter)], parameter.main_grad
                bad = first_bad([(name, gradient)])  # None for a norm that overflowed, or where a shard was reduced
                where = _counted(bad) if bad is not None else "NaN or infinite values in"
                yield Finding(self._places[name], f"{where} the gradient of {name}")

    def _bad_by_name(self) -> Iterator[Finding]:
        for name, total in self._sums_by_name.items():
            if not bool(torch.isfinite(total)):
                yield Finding(self._places[name], f"NaN or infinite values in the gradient of {name}")

    def watch(self, name: str, weight: torch.Tensor) -> None:
        """Sum every gradient of `weight` as it is made."""

        def add(gradient: torch.Tensor) -> None:
            total = gradient.sum(dtype=torch.float32)
            known = self._sums_by_name.get(name)
            self._sums_by_name[name] = total if known is None else known + total

        _before_other_uses(weight, add)

    def before_reduction(self, parameters: Sequence[Any]) -> None:
        """Take the norms of the `main_grad` of `parameters`."""
        self._norms.append(_norms(parameters))


def _norms(parameters: Sequence[Any]) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
    gradients = [parameter.main_grad for parameter in parameters]
    # In fp32, whatever they are: a norm that fp16 cannot hold is no infinity in a gradient.
    return parameters, torch._foreach_norm(gradients, 2, dtype=torch.float32)  # pyright: ignore


def _counted(bad: BadTensor) -> str:
    return f"{bad.nan} NaN and {bad.inf} infinite values in"


def _before_other_uses(weight: torch.Tensor, action: Callable[[torch.Tensor], None]) -> None:
    """Call `action` with every gradient of `weight`, once it is complete and before a wrapper takes it away."""

    def run(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        action(weight.grad)

    others: Any = weight._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    taken = list(others.items()) if others else []
    if others:
        others.clear()
    weight.register_post_accumulate_grad_hook(run)
    if taken:
        weight._post_accumulate_grad_hooks.update(taken)  # pyright: ignore[reportAttributeAccessIssue]
