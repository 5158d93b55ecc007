"""AdamW whose averages are kept in 16 bits: half the memory of the optimizer's state, or a quarter less.

Source: Kingma and Ba 2015 (arXiv:1412.6980), Algorithm 1, with the decoupled weight decay of Loshchilov and Hutter 2019
(arXiv:1711.05101), Algorithm 2. The averages are rounded to the nearest value of their type when they are put away, and
everything is computed in fp32.
"""

import math
from typing import Any

import torch

from megatron_ext.optim.by_tensor import ByTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ShortAdam(ByTensor):
    """AdamW with averages of any precision.

    bf16 has the range of fp32 and 8 bits: an average that changes by less than 1/512 of itself in a step stays as it
    is. With beta2 0.999 the average of the squares does so where the gradients change little, so that it is better left
    in fp32, or beta2 made smaller.

    Args:
        params: tensors, or parameter groups with any of the settings below.
        lr: the learning rate.
        betas: how the averages of the gradient, and of its square, decay.
        eps: added to the root of the average square.
        dtypes: types of the two averages, "fp32" or "bf16".
        weight_decay: the share of the weights that a step of length 1 takes away.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        dtypes: tuple[str, str] = ("bf16", "bf16"),
        weight_decay: float = 0.0,
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "dtypes": dtypes, "weight_decay": weight_decay}
        # What torch's own has, and whoever begins its state asks for: no fused kernel, no graph.
        super().__init__(params, {**settings, "fused": False, "capturable": False})

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = gradient.float()
        state, (beta1, beta2), rate = self.state[weights], group["betas"], group["lr"]
        if "exp_avg" not in state:
            for name, dtype in zip(("exp_avg", "exp_avg_sq"), group["dtypes"], strict=True):
                state[name] = torch.zeros_like(weights, dtype=DTYPES[dtype], memory_format=torch.preserve_format)
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        count = int(state["step"])
        average = state["exp_avg"].float().lerp(gradient, 1 - beta1)
        square = (state["exp_avg_sq"].float() * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(average)
        state["exp_avg_sq"].copy_(square)
        root = square.sqrt_().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
        weights.mul_(1 - rate * group["weight_decay"])
        weights.addcdiv_(average, root, value=-rate / (1 - beta1**count))
