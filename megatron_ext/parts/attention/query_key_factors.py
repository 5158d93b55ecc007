"""Factors of the rows of the weights that make queries and keys, for QK-clip (optim/qk_clip.py)."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch


class QueryKeyFactors(NamedTuple):
    """Factors of the rows of each group of heads that share keys, each [groups, 1]."""

    query: torch.Tensor
    key: torch.Tensor
    both: torch.Tensor
    """Factors of the product of query and key, for channels whose keys belong to all heads."""

    one: torch.Tensor
    """Ones, for rows that make neither."""

    @staticmethod
    def rows(*parts: tuple[torch.Tensor, int]) -> torch.Tensor:
        """Return the factors of the rows of a weight, from the factor and the number of each part of a group's rows."""
        return torch.cat([factor.expand(-1, size) for factor, size in parts], dim=1).flatten()


@runtime_checkable
class HasQueryKeyWeights(Protocol):
    """Attention whose queries and keys QK-clip can make smaller. Its `core_attention` measures their products."""

    def query_key_weights(self) -> list[torch.nn.Parameter]:
        """Return the weights that make queries and keys."""
        ...

    def query_key_rows(self, factors: QueryKeyFactors) -> list[torch.Tensor]:
        """Return the factors of the rows of each of `query_key_weights`."""
        ...
