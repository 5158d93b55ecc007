"""Remembers whether this rank's own gradients were finite before the reduction over ranks.

After the reduction every data-parallel rank holds the same NaN and nobody can say whose it was. So each gradient's norm
is taken just before its reduction (one pass, no synchronization with the host); only when the gradients that the update
would use turn out bad are those norms read. A rank that is alone mixes nothing: its gradients are looked at when they
turn out bad, and are not read twice in a good step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from megatron_ext.model.names import AFTER_ALL, forward_place, global_named_parameters
from megatron_ext.resilience.numeric import BadTensor, first_bad
from megatron_ext.sharding.scheme import Sharding


class Finding(NamedTuple):
    """A problem that a rank found in its gradients."""

    position: tuple[int, int]
    """Place in the order of a forward pass. NaN spreads backward, so the finding with the last place is the cause."""

    text: str


class Seen(NamedTuple):
    """Observations of passes that are to be replayed without their hooks."""

    reduced: Sequence[Sequence[Any]]
    """Parameters whose gradients were reduced together, of a rank that is alone."""

    norms: Sequence[tuple[Sequence[Any], Sequence[torch.Tensor]]]
    """Norms as in `Evidence`, in tensors that a replay writes anew."""


@dataclass
class Evidence:
    """Observations of one step, on the device."""

    loss: torch.Tensor
    """This rank's part of the loss, a scalar that is written when the forward passes are done."""

    norms: list[tuple[Sequence[Any], Sequence[torch.Tensor]]] = field(default_factory=list)
    """Parameters whose gradients were reduced together, and the norms of these before; of a rank that is alone, those
    that the update has taken, or none."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums of gradients that never existed as whole tensors, by the global name of their weight."""


class GradientWatch:
    """Watches every local gradient of a step, and names the first that is NaN or infinite.

    Args:
        modules: of each layer of the model, its modules in the order of a forward pass.
        alone: whether there is no other rank.
    """

    def __init__(
        self, chunks: Sequence[_BaseDataParallel], sharding: Sharding, modules: Sequence[Sequence[str]], *, alone: bool
    ):
        self._modules = modules
        self._alone = alone
        self._reduced: list[Sequence[Any]] = []
        self._names: dict[int, str] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._evidence: Evidence | None = None
        for chunk in chunks:
            sharding.watch(chunk, self)

    def begin(self, loss: torch.Tensor) -> Evidence:
        """Return the record of all observations from now on, until the next step begins.

        Args:
            loss: this rank's part of the loss of the step that begins, a scalar on the device to be written later.
        """
        self._evidence = Evidence(loss)
        self._reduced.clear()
        return self._evidence

    def is_of_these_gradients(self, evidence: Evidence) -> bool:
        """Return whether the gradients that `evidence` describes still exist: no step has begun since."""
        return evidence is self._evidence

    def diagnose(self, evidence: Evidence) -> Finding | None:
        """Return the cause, as far as this rank can tell from its own loss and its gradients before any reduction."""
        if not bool(torch.isfinite(evidence.loss)):
            return Finding(AFTER_ALL, "NaN or infinity in the loss")
        return max((*self._bad_in_buckets(evidence), *self._bad_by_name(evidence)), default=None)

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
            self._places[name] = forward_place(name, parameter, self._modules)
        return parameters

    def _bad_in_buckets(self, evidence: Evidence) -> Iterator[Finding]:
        still_there = self.is_of_these_gradients(evidence)
        alone = [_norms(parameters) for parameters in self._reduced] if still_there else []
        for parameters, norms in alone or evidence.norms:
            finite: list[bool] = torch.stack([*norms]).isfinite().tolist()
            for parameter, is_finite in zip(parameters, finite, strict=True):
                if is_finite:
                    continue
                name, gradient = self._names[id(parameter)], parameter.main_grad
                # None for a norm that overflowed, or where a shard was reduced.
                bad = first_bad([(name, gradient)]) if still_there else None
                where = _counted(bad) if bad is not None else "NaN or infinite values in"
                yield Finding(self._places[name], f"{where} the gradient of {name}")

    def _bad_by_name(self, evidence: Evidence) -> Iterator[Finding]:
        for name, total in evidence.sums.items():
            if not bool(torch.isfinite(total)):
                yield Finding(self._places[name], f"NaN or infinite values in the gradient of {name}")

    def watch(self, name: str, weight: torch.Tensor) -> None:
        """Sum every gradient of `weight` as it is made."""

        def add(gradient: torch.Tensor) -> None:
            if self._evidence is None:
                return
            total, sums = gradient.sum(dtype=torch.float32), self._evidence.sums
            sums[name] = sums[name] + total if name in sums else total

        _before_other_uses(weight, add)

    def before_reduction(self, parameters: Sequence[Any]) -> None:
        """Take the norms of the `main_grad` of `parameters`, or remember only whose they are."""
        if self._alone:
            self._reduced.append(parameters)
        elif self._evidence is not None:
            self._evidence.norms.append(_norms(parameters))

    def seen(self) -> Seen:
        """Return the observations since `begin`."""
        assert self._evidence is not None, "no step was begun"
        assert not self._evidence.sums, "gradients that are never there as a whole are not replayed"
        return Seen(tuple(self._reduced), tuple(self._evidence.norms))

    def see_again(self, seen: Seen) -> None:
        """Take over the observations of this step's replayed passes: copies, which stay as they are when the next step
        is replayed."""
        assert self._evidence is not None, "no step was begun"
        self._reduced[:] = seen.reduced
        self._evidence.norms[:] = [(parameters, torch.stack([*norms]).unbind()) for parameters, norms in seen.norms]

    def take_norms(self, parameters: Sequence[Any], norms: torch.Tensor | None) -> None:
        """Take the norms that the update has taken of the gradients of `parameters`, [N]. They tell something only of
        gradients that no other rank has had a part in."""
        if self._alone and self._evidence is not None and norms is not None:
            self._evidence.norms.append((parameters, list(norms)))


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
    hooks = list(others.items()) if others else []
    if others:
        others.clear()
    weight.register_post_accumulate_grad_hook(run)
    if hooks:
        weight._post_accumulate_grad_hooks.update(hooks)  # pyright: ignore[reportAttributeAccessIssue]
