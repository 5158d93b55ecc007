"""Lion: a step of the same size for every element, in the direction of a momentum's sign.

Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675), Algorithm 2.
"""

from typing import Any

import torch

from megatron_ext.optim.torch_optimizer import ByTensor


class Lion(ByTensor):
    """Lion with decoupled weight decay. It keeps one state, the momentum `exp_avg`, where Adam keeps two.

    With the weights x, their gradient g and the momentum m, which begins at 0, an update is

        x <- x - lr (sign(beta1 m + (1 - beta1) g) + weight_decay x)
        m <- beta2 m + (1 - beta2) g

    Where both momentum and gradient are 0, as in rows of padded vocabulary, the sign is 0 and nothing moves. The paper
    takes a learning rate 3 to 10 times smaller than Adam's, and a weight decay as many times larger.

    Args:
        params: tensors, or parameter groups with any of the settings below.
        lr: the step of every element.
        betas: beta1, the momentum's share of the direction, and beta2, by which the momentum decays. The defaults are
            megatron-core's.
        weight_decay: the share of the weights that a step of length 1 takes away.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.95, 0.98), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weights, memory_format=torch.preserve_format)
        momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
        # Products are rounded before they are added, as the equations are written; a fused multiply-add has other bits.
        direction = (momentum * beta1).add_(gradient * (1 - beta1)).sign_()
        if group["weight_decay"]:
            direction.add_(weights * group["weight_decay"])
        weights.sub_(direction.mul_(group["lr"]))
        momentum.mul_(beta2).add_(gradient * (1 - beta2))
