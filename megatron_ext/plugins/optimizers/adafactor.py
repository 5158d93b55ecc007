"""Adafactor: a second moment that is kept as the means of its rows and of its columns.

Source: Shazeer and Stern 2018, Adafactor (arXiv:1804.04235), Algorithm 4, as torch.optim.Adafactor has it, which takes
every tensor for a whole one; here it may be a part of a matrix, or a stack of experts' matrices.
"""

from typing import Any

import torch

from megatron_ext.optim.torch_optimizer import ByTensor
from megatron_ext.parallel.matrices import matrix_of


class Adafactor(ByTensor):
    """Adafactor with decoupled weight decay, of matrices.

    It keeps the means `row_var`, [..., rows, 1], and `col_var`, [..., 1, columns]. With a matrix W, its gradient G, the
    means R and C, which begin at 0, and the number t of the update,

        R <- (1 - t^tau) R + t^tau mean of rows (G^2);  C <- (1 - t^tau) C + t^tau mean of columns (G^2)
        V = max(R C / max(mean(R), eps1), eps1^2);  U = G / root(V)
        W <- W - lr weight_decay W - min(lr, 1 / root(t)) max(eps2, rms(W)) U / max(1, rms(U) / d)

    where eps1 is the precision of the numbers. Means and roots of mean squares are taken over the whole matrix,
    whatever ranks divide it.

    Args:
        params: matrices, or parameter groups with any of the settings below.
        lr: the largest step, relative to the size of the weights.
        weight_decay: the share of the weights that a step of length 1 takes away.
        beta2_decay: tau.
        eps2: the smallest size of the weights that steps are relative to.
        clip: d, the largest root of the mean square of an update before its step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        beta2_decay: float = -0.8,
        eps2: float = 1e-3,
        clip: float = 1.0,
    ):
        settings = {"lr": lr, "weight_decay": weight_decay, "beta2_decay": beta2_decay, "eps2": eps2, "clip": clip}
        super().__init__(params, {**settings, "fused": False, "capturable": False})

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        matrix, state, eps1 = matrix_of(weights), self.state[weights], torch.finfo(weights.dtype).eps
        if "row_var" not in state:
            state["row_var"] = torch.zeros_like(weights.sum(-1, keepdim=True))
            state["col_var"] = torch.zeros_like(weights.sum(-2, keepdim=True))
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        count, rows, columns = float(state["step"]), matrix.size(-2), matrix.size(-1)

        def rms(x: torch.Tensor) -> torch.Tensor:
            return (matrix.summed(x.square(), -2, -1) / (rows * columns)).sqrt_()

        squares, new = gradient.square(), count ** group["beta2_decay"]
        of_rows = state["row_var"].lerp_(matrix.summed(squares, -1) / columns, new)
        of_columns = state["col_var"].lerp_(matrix.summed(squares, -2) / rows, new)
        mean = (matrix.summed(of_rows, -2) / rows).clamp_min_(eps1)
        update = (of_rows * of_columns).div_(mean).clamp_min_(eps1**2).rsqrt_().mul_(gradient)
        step = rms(weights).clamp_min_(group["eps2"]) * min(group["lr"], count**-0.5)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.sub_(update.mul_(step / (rms(update) / group["clip"]).clamp_min_(1.0)))
