"""AdaptiveMuon: Muon whose orthogonal updates are divided by the root of their second moment.

Sources: Si et al. 2025, AdaMuon (arXiv:2507.11005); Li et al. 2025, NorMuon (arXiv:2510.05491); NAMO
(arXiv:2602.17080). The arithmetic follows the package emerging-optimizers 0.3.
"""

from dataclasses import replace
from typing import Any

import torch

from megatron_ext.optim.muon import Muon
from megatron_ext.parallel.matrices import matrix_of


class AdaptiveMuon(Muon):
    """Muon that keeps a second state, `moment2_buffer`, of the shape of what is updated.

    With Muon's direction D of a gradient G, and O = newton_schulz(D) without a scale, the second moment V, which begins
    at 0, follows by V <- beta2 V + (1 - beta2) S, and the update is scale U:

        adamuon: S = O^2 of each element;                              U = O / (root(V) + eps)
        normuon: S = the mean of O^2 along the longer of rows and columns (rows where they are equal);
                 U = O / root(max(V, eps)), with the norm of O
        namo:    S = |G|^2, one number;                                U = O |D| / (root(V) + eps)

    Rows and norms are taken over the whole matrix, whatever ranks divide it. Queries, keys and values are made
    orthogonal each by itself, as by Muon; second moment and scale are of their whole matrix, as in Megatron-LM.

    Args:
        params, settings: as Muon's.
        moment2_method: adamuon, normuon or namo.
        beta2: the decay of the second moment.
        eps: what keeps a quotient finite.
    """

    def __init__(
        self, params: Any, *, moment2_method: str = "adamuon", beta2: float = 0.95, eps: float = 1e-8, **settings: Any
    ):
        super().__init__(params, **settings)
        self._method, self._beta2, self._epsilon = moment2_method, beta2, eps

    def _scaled(self, made: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return made  # the scale comes after the second moment

    def _adapted(self, weight: torch.Tensor, direction: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        matrix, state = matrix_of(weight), self.state[weight]
        if self._tp_mode == "blockwise":
            matrix = replace(matrix, divided=None)
        moment = state.setdefault("moment2_buffer", torch.zeros_like(weight))
        rows, columns = matrix.size(-2), matrix.size(-1)

        def squares(x: torch.Tensor, *dims: int) -> torch.Tensor:
            return matrix.summed(x.square(), *dims)

        if self._method == "adamuon":
            moment.lerp_(made.square(), 1 - self._beta2)
            update = made / (moment.sqrt() + self._epsilon)
        elif self._method == "normuon":
            dim = -1 if rows >= columns else -2
            moment.lerp_(squares(made, dim) / matrix.size(dim), 1 - self._beta2)
            update = made * moment.clamp_min(self._epsilon).rsqrt_()
            update *= squares(made, -2, -1).sqrt_() / squares(update, -2, -1).sqrt_().clamp_min(self._epsilon)
        else:
            assert weight.grad is not None
            moment.lerp_(squares(weight.grad, -2, -1), 1 - self._beta2)
            update = made * (squares(direction, -2, -1).sqrt_() / (moment.sqrt() + self._epsilon))
        return super()._scaled(update, rows, columns)
