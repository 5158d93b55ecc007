"""Muon: the momentum of each matrix, made orthogonal, is its update.

Source: Jordan et al. 2024, Muon (https://kellerjordan.github.io/posts/muon/); its scale: Liu et al. 2025, Muon is
Scalable for LLM Training (arXiv:2502.16982). The arithmetic follows the package emerging-optimizers 0.3, which
Megatron-LM uses and which cannot be imported without Triton.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import batched
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_ext.config.derived.newton_schulz import Coefficients, coefficients, scale
from megatron_ext.parallel.matrices import Matrix, matrix_of, on_owners

_AT_ONCE = 1 << 24
"""Elements of matrices of one shape that are computed in one product: more are not faster, and take more memory."""


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay. It keeps one state, the momentum `momentum_buffer`.

    With a matrix W, its gradient G and the momentum M, which begins at 0, an update is

        M <- momentum M + (1 - momentum) G;  D = M, or with Nesterov's momentum M + (1 - momentum) (G - M)
        W <- W - lr weight_decay W
        W <- W - lr scale newton_schulz(D)

    An updated tensor may be a part of a matrix, or a stack of experts' matrices (`parallel/matrices.py`). Matrices of
    one shape are computed together.

    Args:
        params: matrices, or parameter groups of them.
        lr: the step.
        weight_decay: the share of the weights that a step of length 1 takes away.
        momentum: the decay of the momentum.
        nesterov: whether the direction looks ahead by a momentum.
        scale_mode, extra_scale_factor: factors of the update (`config/derived/newton_schulz.py`).
        num_ns_steps, coefficient_type: the number of iterations, and their coefficients.
        no_split_qkv: whether queries, keys and values are one matrix, not three.
        tp_mode: how tensor-parallel ranks compute a matrix that they divide: each gathers it (duplicated), or its own
            part of each product, whose sums they exchange (distributed), or its part as if that were all (blockwise).
        fp32_matmul_prec: precision of the products on a GPU, as torch.set_float32_matmul_precision names it.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        num_ns_steps: int = 5,
        coefficient_type: str = "quintic",
        no_split_qkv: bool = False,
        tp_mode: str = "duplicated",
        fp32_matmul_prec: str = "medium",
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._momentum, self._nesterov = momentum, nesterov
        self._scale_mode, self._extra_scale = scale_mode, extra_scale_factor
        self._coefficients = coefficients(coefficient_type, num_ns_steps)
        self._whole_qkv, self._tp_mode, self._precision = no_split_qkv, tp_mode, fp32_matmul_prec

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            cut = [weight for weight in weights if matrix_of(weight).is_cut]
            whole = [weight for weight in weights if not matrix_of(weight).is_cut]
            alike = [[whole[index] for index in some] for some in _alike(whole, [matrix_of(one) for one in whole])]
            for some in [*alike, cut] if cut else alike:
                directions, matrices = [self._direction(weight) for weight in some], [matrix_of(one) for one in some]
                if some is cut:
                    shards: Any = [matrix.rows for matrix in matrices]
                    made = on_owners(directions, shards, lambda own, w, m=matrices: self._made(w, [m[i] for i in own]))
                else:
                    made = self._made(directions, matrices)
                for weight, direction, result in zip(some, directions, made, strict=True):
                    update = self._adapted(weight, direction, result)
                    if group["weight_decay"]:
                        weight.add_(weight, alpha=-group["weight_decay"] * group["lr"])
                    weight.add_(update, alpha=-group["lr"])

    def _made(self, directions: Sequence[torch.Tensor], matrices: Sequence[Matrix]) -> list[torch.Tensor]:
        """Return the update of each direction; matrices of one shape are computed together."""
        found: dict[int, torch.Tensor] = {}
        for some in _alike(directions, matrices):
            updates = self._update(torch.stack([directions[index] for index in some]), matrices[some[0]])
            found |= zip(some, updates, strict=True)
        return [found[index] for index in range(len(directions))]

    def _direction(self, weight: torch.Tensor) -> torch.Tensor:
        """Add the gradient to the momentum, and return the direction, which is to be made orthogonal."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(momentum, self._momentum) if self._nesterov else momentum

    def _adapted(self, weight: torch.Tensor, direction: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Return the update of this rank's part, from its direction and the update `made` of it."""
        return made

    def _update(self, directions: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return the updates of parts of one kind, [N, rows, columns] or [N, experts, rows, columns]."""
        parts, divided, group = directions.flatten(0, -3), matrix.divided, matrix.group
        sections = () if self._whole_qkv else matrix.sections
        if divided is None or group is None:
            return self._of_sections(parts, sections).view_as(directions)
        # More ranks than groups of heads cut through a group: then it is gathered in any case.
        if self._tp_mode == "duplicated" or parts.size(1) % sum(sections or (1,)):
            gathered = [torch.empty_like(parts) for _ in range(group.size())]
            torch.distributed.all_gather(gathered, parts.contiguous(), group=group)
            whole = self._of_sections(torch.cat(gathered, dim=divided), sections)
            return whole.chunk(group.size(), dim=divided)[group.rank()].reshape(directions.shape)
        split = (divided, group) if self._tp_mode == "distributed" else ()
        return self._of_sections(parts, sections, *split).view_as(directions)

    def _of_sections(self, x: torch.Tensor, sections: tuple[int, ...], *divided: Any) -> torch.Tensor:
        """Return the updates of matrices, [N, rows, columns]; each section is made orthogonal by itself."""
        if not sections:
            return self._orthogonal(x, *divided)
        parts = x.unflatten(1, (-1, sum(sections))).split(sections, dim=2)
        made = [self._orthogonal(part.flatten(1, 2), *divided).view_as(part) for part in parts]
        return torch.cat(made, dim=2).view_as(x)

    def _orthogonal(
        self, x: torch.Tensor, divided: int | None = None, group: ProcessGroup | None = None
    ) -> torch.Tensor:
        """Return matrices, [N, rows, columns], made orthogonal and scaled; of those that are `divided`, this rank's
        parts."""
        size = [x.size(-2), x.size(-1)]
        if divided is not None and group is not None:
            size[divided] *= group.size()
        # Products sum over the dimension that is divided.
        transposed = size[0] > size[1] if divided is None else divided == -2
        with _precision(self._precision if x.is_cuda else "highest"):
            made = newton_schulz(x, self._coefficients, transposed=transposed, group=group)
        return self._scaled(made, size[0], size[1])

    def _scaled(self, made: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return orthogonal matrices scaled to the size of an update."""
        return made * scale(self._scale_mode, rows, columns) * self._extra_scale


def newton_schulz(
    parts: torch.Tensor, iterations: Sequence[Coefficients], *, transposed: bool, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return the matrices [N, rows, columns] with singular values of about 1, and their singular vectors.

    Args:
        parts: the matrices, or parts of them that lie side by side, or one above another where `transposed`.
        iterations: coefficients of each iteration.
        transposed: whether the Gram matrix is over columns and not over rows: the smaller number is the cheaper.
        group: ranks that have one part each; None: they are whole. Collective over it.
    """
    x = parts.mT if transposed else parts
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if group is not None:
        norm.square_()
        torch.distributed.all_reduce(norm, group=group)
        norm.sqrt_()
    x = x / norm.clamp_min(1e-7)
    for a, b, c in iterations:
        gram = x @ x.mT
        if group is not None:
            torch.distributed.all_reduce(gram, group=group)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if transposed else x


def _alike(parts: Sequence[torch.Tensor], matrices: Sequence[Matrix]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of matrices whose parts on this rank can be computed in one product."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for number, (part, matrix) in enumerate(zip(parts, matrices, strict=True)):
        alike[matrix.shape, part.shape, matrix.sections, matrix.divided, id(matrix.group)].append(number)
    for (shape, *_), numbers in alike.items():
        yield from batched(numbers, max(_AT_ONCE // math.prod(shape), 1))


@contextmanager
def _precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
