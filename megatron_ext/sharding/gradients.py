"""The gradients that an update would use, on this rank. Call these functions after the optimizer's `prepare_grads`."""

import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_ext.sharding.parts import OptimizerPart


class _LeftOut(NamedTuple):
    having: list[Any]
    """Weights that had a gradient when this was found out."""
    outside: list[Any]
    """Weights of these that the norm leaves out."""


_left_out: weakref.WeakKeyDictionary[Any, _LeftOut] = weakref.WeakKeyDictionary()


def outside_norm(optimizer: ChainedOptimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's gradients that are not in the global norm.

    The norm leaves out what it would count twice: all but the first tensor-parallel rank's gradient of a replicated
    parameter, and the last stage's of tied embeddings. They update copies of the weight all the same.
    """
    for part in optimizer.chained_optimizers:
        having = [main for main in part.get_parameters() if main.grad is not None]
        known = _left_out.get(part)
        # What is left out follows from marks of the weights, which the engine asks for one by one.
        if known is None or len(known.having) != len(having) or not all(map(operator.is_, known.having, having)):
            # Not by the part's own method, which may return the norm of what it stands for.
            counted = {id(gradient) for gradient in MegatronOptimizer.get_grads_for_grad_norm(part)}
            known = _LeftOut(having, [main for main in having if id(main.grad) not in counted])
            _left_out[part] = known
        yield from (main.grad for main in known.outside if main.grad is not None)


def gradients_of_update(parts: Iterable[OptimizerPart]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter of the model that has a gradient, with this rank's part of it."""
    for part in parts:
        for parameter, main in part.main_parameters():
            if main.grad is not None:
                yield parameter, main.grad
