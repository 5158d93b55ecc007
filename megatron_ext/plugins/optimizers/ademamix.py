"""AdEMAMix: Adam whose step mixes a fast average of the gradients with a slow one.

Source: Pagliardini et al. 2024, The AdEMAMix Optimizer: Better, Faster, Older (arXiv:2409.03137), Algorithm 1, with the
schedulers of alpha and beta3 of its section 3.
"""

import math
from typing import Any

import torch

from megatron_ext.optim.torch_optimizer import ByTensor


class AdEMAMix(ByTensor):
    """AdEMAMix with decoupled weight decay. It keeps the averages `exp_avg`, `exp_avg_slow` and `exp_avg_sq`.

    With the weights x, their gradient g, the averages m (fast), s (slow) and v (of squares), which begin at 0, and the
    number t of the update, an update is

        m <- beta1 m + (1 - beta1) g;  s <- beta3(t) s + (1 - beta3(t)) g;  v <- beta2 v + (1 - beta2) g^2
        x <- x - lr ((m / (1 - beta1^t) + alpha(t) s) / (root(v / (1 - beta2^t)) + eps) + weight_decay x)

    Args:
        params: tensors, or parameter groups with any of the settings below.
        lr: the learning rate.
        betas: decay rates of the fast average, the average of squares, and the slow average.
        alpha: the slow average's share.
        warmup: updates in which alpha and beta3 reach their values, from 0 and beta1 on; 0: they have them at once.
        eps: added to the root of the average square.
        weight_decay: the share of the weights that a step of length 1 takes away.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        warmup: int = 0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        settings = {"lr": lr, "betas": betas, "alpha": alpha, "warmup": warmup, "eps": eps}
        super().__init__(params, {**settings, "weight_decay": weight_decay, "fused": False, "capturable": False})

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2, _) = self.state[weights], group["betas"]
        if "exp_avg" not in state:
            for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                state[name] = torch.zeros_like(weights, memory_format=torch.preserve_format)
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        count = int(state["step"])
        alpha, beta3 = mixture(count, group)
        fast = state["exp_avg"].lerp_(gradient, 1 - beta1)
        slow = state["exp_avg_slow"].lerp_(gradient, 1 - beta3)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.addcdiv_((fast / (1 - beta1**count)).add_(slow, alpha=alpha), root, value=-group["lr"])


def mixture(count: int, group: dict[str, Any]) -> tuple[float, float]:
    """Return alpha and beta3 in update number `count`, which begins at 1.

    On its way, the half-life of the slow average grows linearly.
    """
    (beta1, _, beta3), alpha, warmup = group["betas"], group["alpha"], group["warmup"]
    if count >= warmup or 0.0 in (beta1, beta3):
        return alpha, beta3
    done = count / warmup
    way = (1 - done) * math.log(beta3) + done * math.log(beta1)
    return done * alpha, min(math.exp(math.log(beta1) * math.log(beta3) / way), beta3)
