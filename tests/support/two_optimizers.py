"""Two optimizers in one run, as a user registers them: one for matrices, Adam for the rest."""

import dataclasses
from typing import Any

import torch

from megatron_ext.config.derived.optimizer_traits import OptimizerTraits, State
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.optim.torch_optimizer import ByTensor


class EvenSteps(ByTensor):
    """Momentum whose step has the size of its matrix' root mean square gradient taken as 1: m <- 0.9 m + g;
    x <- x - lr m / rms(m). Of a stack of experts each matrix has its own."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        assert weights.dim() in (2, 3), "a matrix, or a stack of those of experts"
        state = self.state[weights]
        momentum = state.setdefault("momentum", torch.zeros_like(weights))
        momentum.mul_(0.9).add_(gradient)
        size = momentum.square().mean(dim=(-2, -1), keepdim=True).sqrt_().clamp_(min=1e-12)
        weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * momentum / size)


EVEN_STEPS = OptimizerTraits(
    name="even-steps",
    title="steps of one size",
    torch_class=f"{__name__}:EvenSteps",
    arguments={},
    states=(State("momentum"),),
    schemes=frozenset({"use_distributed_optimizer"}),
    built_as="adam",
    needs_whole_matrices=True,
    of_elements=OPTIMIZERS["adam"],
)
SGD_AND_ADAM = dataclasses.replace(
    OPTIMIZERS["sgd"],
    name="sgd-and-adam",
    title="SGD, and Adam on what is no matrix",
    schemes=OPTIMIZERS["adam"].schemes,
    built_as="adam",
    of_elements=OPTIMIZERS["adam"],
)
