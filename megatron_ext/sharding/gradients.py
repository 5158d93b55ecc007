"""The gradients that an update would use, on this rank. Call these functions after the optimizer's `prepare_grads`."""

from collections.abc import Iterable, Iterator

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_ext.sharding.parts import OptimizerPart


def outside_norm(optimizer: ChainedOptimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's gradients that are not in the global norm.

    The norm leaves out what it would count twice: all but the first tensor-parallel rank's gradient of a replicated
    parameter, and the last stage's of tied embeddings. They update copies of the weight all the same.
    """
    for part in optimizer.chained_optimizers:
        # Not by the part's own method, which may return the norm of what it stands for.
        counted = {id(gradient) for gradient in MegatronOptimizer.get_grads_for_grad_norm(part)}
        for main in part.get_parameters():
            if main.grad is not None and id(main.grad) not in counted:
                yield main.grad


def gradients_of_update(parts: Iterable[OptimizerPart]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter of the model that has a gradient, with this rank's part of it."""
    for part in parts:
        for parameter, main in part.main_parameters():
            if main.grad is not None:
                yield parameter, main.grad
