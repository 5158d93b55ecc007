"""Schedule-free AdamW: gradients are taken between a sequence of steps and its average, which is what is evaluated.

Source: Defazio et al. 2024, The Road Less Scheduled (arXiv:2405.15682), Algorithm 1. The arithmetic follows
AdamWScheduleFree in the authors' package schedulefree 1.4 with its defaults, which keeps the average only by way of the
other two sequences.
"""

from typing import Any

import torch

from megatron_ext.optim.torch_optimizer import ByTensor


class ScheduleFree(ByTensor):
    """Schedule-free AdamW. It keeps the steps `z`, their `average`, and `exp_avg_sq`.

    The weights y are where gradients are taken. With z and the average x, which begin as the weights, and the average v
    of squares, which begins at 0, update number t is

        v <- beta2 v + (1 - beta2) g^2;  d = g / (root(v / (1 - beta2^t)) + eps) + weight_decay y
        z <- z - lr d;  x <- (1 - c) x + c z, where c = lr^2 / (the sum of lr^2 so far);  y <- (1 - beta1) z + beta1 x

    With a warmup, lr in c is the largest so far. The learning rate has no decay.

    Args:
        params: tensors, or parameter groups with any of the settings below. A group's `scheduled_lr` is what c is
            computed from, so that groups of different rates have one average; default its `lr`.
        lr: the learning rate.
        betas: the average's share of the weights, and how the average of the squares decays.
        eps: added to the root of the average square.
        weight_decay: the share of the weights that a step of length 1 takes away.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "fused": False, "capturable": False})

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), rate = self.state[weights], group["betas"], group["lr"]
        if "z" not in state:
            state["z"], state["average"] = weights.clone(), weights.clone()
            state["exp_avg_sq"] = torch.zeros_like(weights, memory_format=torch.preserve_format)
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in ("largest_rate", "summed_squares"):
            state.setdefault(name, torch.zeros((), dtype=torch.float64))
        state["step"] += 1
        largest = state["largest_rate"].clamp_(min=group.get("scheduled_lr", rate))
        summed = state["summed_squares"].add_(largest**2)
        share = float(largest**2 / summed) if summed else 0.0
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2 ** int(state["step"]))).sqrt_().add_(group["eps"])
        direction = (gradient / root).add_(weights, alpha=group["weight_decay"])
        steps = state["z"].sub_(direction, alpha=rate)
        average = state["average"].lerp_(steps, share)
        weights.copy_(torch.lerp(steps, average, beta1))
