"""AdamW whose averages are kept in 16 bits: half the memory of the optimizer's state, or a quarter less.

Source: Kingma and Ba 2015 (arXiv:1412.6980), Algorithm 1, with the decoupled weight decay of Loshchilov and Hutter 2019
(arXiv:1711.05101), Algorithm 2. The averages are rounded to the nearest value of their type when they are put away, and
everything is computed in fp32.

fp16 has 11 bits and a narrow range, in which squares of gradients vanish. An average in fp16 is therefore kept as its
root, with its sign, times a constant: of gradients between 2^-32 and 2^8. (Transformer Engine scales each tensor by its
largest value instead, which would differ between the shards of different layouts.) A root of an average square below
2^-32 does not count next to Adam's epsilon; an average above is kept as the largest.
"""

import math
from typing import Any

import torch

from megatron_ext.optim.torch_optimizer import ByTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_SCALES = {"exp_avg": 2.0**11, "exp_avg_sq": 2.0**8}
"""Factor of the root of an average when it is stored in fp16. fp16 holds 2^-24 to 2^16: gradients of 2^-70 to 2^10 in
the first average, of 2^-32 to 2^8 in the second."""

_LARGEST = torch.finfo(torch.float16).max


def keep(kept: torch.Tensor, name: str, average: torch.Tensor) -> None:
    """Store the average `name` into `kept`, in its dtype."""
    if kept.dtype == torch.float16:
        root = average.abs().sqrt_().mul_(_SCALES[name]).clamp_(max=_LARGEST)
        average = root.copysign_(average)
    kept.copy_(average)


def kept_average(kept: torch.Tensor, name: str) -> torch.Tensor:
    """Return the average `name` that was stored in `kept`, in fp32."""
    found = kept.float()
    if kept.dtype == torch.float16:
        found = found.div_(_SCALES[name])
        found = found * found.abs()
    return found


class ShortAdam(ByTensor):
    """AdamW with averages of any precision.

    bf16 has the range of fp32 and 8 bits: an average that changes by less than 1/512 of itself in a step stays as it
    is. With beta2 0.999 the average of the squares does so where the gradients change little, so that it is better left
    in fp32, or beta2 made smaller. fp16 keeps 10 bits of an average, four times as fine.

    Args:
        params: tensors, or parameter groups with any of the settings below.
        lr: the learning rate.
        betas: how the averages of the gradient, and of its square, decay.
        eps: added to the root of the average square.
        dtypes: types of the two averages, "fp32", "bf16" or "fp16".
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
        # Options of torch's own Adam, which `begin_state` asks for: no fused kernel, no graph.
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
        average = kept_average(state["exp_avg"], "exp_avg").lerp(gradient, 1 - beta1)
        square = (kept_average(state["exp_avg_sq"], "exp_avg_sq") * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        keep(state["exp_avg"], "exp_avg", average)
        keep(state["exp_avg_sq"], "exp_avg_sq", square)
        root = square.sqrt_().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
        weights.mul_(1 - rate * group["weight_decay"])
        weights.addcdiv_(average, root, value=-rate / (1 - beta1**count))
