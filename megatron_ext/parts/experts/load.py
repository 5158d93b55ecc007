"""Counts the tokens of each expert in training, on the device: nothing is read before somebody asks.

A rank counts the tokens that it routes itself, which are different ones on every rank of a stage. So the sum over all
ranks is the load of the global batch, in every layout.
"""

import torch


class RouterLoad:
    """The numbers of one router on this rank, fp64 [E + 2]: tokens of each expert, all tokens, and the sum of their
    squared logsumexp of the logits (Zoph et al. 2022, arXiv:2202.08906, equation 5)."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # of the steps before, and of this one

    @torch.no_grad()
    def add(self, logits: torch.Tensor, chosen_TE: torch.Tensor) -> None:
        """Add the tokens of a microbatch. logits: [..., E]."""
        squares = logits.float().logsumexp(-1).square().sum(dtype=torch.float64).view(1)
        tokens = squares.new_full((1,), len(chosen_TE))
        added = torch.cat([chosen_TE.sum(0, dtype=torch.float64), tokens, squares])
        if self._counts is None:
            self._counts = added.new_zeros(2, len(added))
        self._counts[1] += added

    def begin_step(self) -> None:
        """Begin the next step; the counts so far belong to the steps before it."""
        if self._counts is not None:
            self._counts[0] += self._counts[1]
            self._counts[1] = 0.0

    def take(self, experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of this step, and of it and those before since the last call, each [E + 2]."""
        nothing = torch.zeros(2, experts + 2, dtype=torch.float64, device=device)
        counts, self._counts = nothing if self._counts is None else self._counts, None
        return counts[1], counts.sum(0)
