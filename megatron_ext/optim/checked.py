"""Whether an update may be made: every gradient that it would use, on this rank, is finite."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_ext.optim.offload import main_parameters
from megatron_ext.resilience.numeric import largest_magnitude


def outside_norm(optimizer: ChainedOptimizer, device: torch.device) -> torch.Tensor:
    """The largest magnitude in this rank's gradients that are not in the global norm, a scalar on `device`.

    The norm leaves out what it would count twice: all but the first tensor-parallel rank's gradient of a replicated
    parameter, and the last stage's of tied embeddings. They update copies of the weight all the same. NaN and infinity
    show here, and those in all other gradients in the norm.

    Call it after `prepare_grads`. It does not wait for the device.
    """
    return largest_magnitude(
        (gradient for part in optimizer.chained_optimizers for gradient in _left_out(part)), device
    )


def _left_out(part: MegatronOptimizer) -> Iterator[torch.Tensor]:
    # Not by the part's own method, which may return the norm of what it stands for.
    counted = {id(gradient) for gradient in MegatronOptimizer.get_grads_for_grad_norm(part)}
    for main in part.get_parameters():
        if main.grad is not None and id(main.grad) not in counted:
            yield main.grad


def gradients_of_update(optimizer: ChainedOptimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    """(Parameter of the model, this rank's part of its gradient), after `prepare_grads`."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            for parameter, main in main_parameters(part):
                if main.grad is not None:
                    yield parameter, main.grad
