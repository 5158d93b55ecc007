"""Holds what a forward pass without training carries through the layers: how it attends, and where it is read.

Two of them: `WholeSequences` attends as training does, `KeyValueCache` keeps keys and values, so that each further
token costs one position. Rows of a batch begin at position 0 and are filled up at their end: causal attention then
needs no mask until the first generated token.

Shape legend: B rows, S positions of this pass, H query heads, G key/value heads, D channels of a head, T positions in
the cache, N positions that are read, V vocabulary of this tensor-parallel rank.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Project = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states [N, hidden] to the logits [N, V]."""


class WholeSequences:
    """Attends within whole sequences, and returns logits at the positions of `wanted`.

    Args:
        wanted: int64 [N], numbers s x B + b of the positions to read, on the device.
    """

    def __init__(self, wanted: torch.Tensor):
        self.wanted = wanted

    def attend(
        self,
        layer_number: int,
        query_BHSD: torch.Tensor,
        key_BGSD: torch.Tensor,
        value_BGSD: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the context of one layer, [B, H, S, D]."""
        return F.scaled_dot_product_attention(
            query_BHSD,
            key_BGSD,
            value_BGSD,
            is_causal=True,
            scale=scale,
            enable_gqa=query_BHSD.size(1) != key_BGSD.size(1),
        )

    def read(self, hidden_SBH: torch.Tensor, project: Project) -> torch.Tensor:
        """Return what the last stage is asked for: the logits, [N, V]."""
        return project(hidden_SBH.flatten(0, 1).index_select(0, self.wanted))


class KeyValueCache(WholeSequences):
    """Keeps keys and values of every layer of this rank: 2 x layers x B x G x D x `positions` numbers, and no more.

    The first pass takes the prompts, each further one the next token of every row (`advance`).

    Args:
        positions: the most positions that a row can come to have.
        wanted: as for `WholeSequences`, of the first pass.
    """

    def __init__(self, positions: int, wanted: torch.Tensor):
        super().__init__(wanted)
        self.positions = positions
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places_B: torch.Tensor | None = None
        self._rows_B = torch.empty(0, dtype=torch.int64)
        self._seen_B11T: torch.Tensor | None = None
        self._length = 0
        self._same = False

    def advance(self, places: list[int], device: torch.device) -> torch.Tensor:
        """Prepare a pass over one token of each row, and return its positions, int64 [B, 1].

        Args:
            places: position of that token in each row: the number of tokens before it.
        """
        self._length, self._same = max(places) + 1, min(places) == max(places)
        assert self._length <= self.positions, "the cache was made for fewer positions"
        self._places_B = torch.tensor(places, device=device)
        if len(self._rows_B) != len(places):
            self._rows_B = torch.arange(len(places), device=device)
            self.wanted = self._rows_B
        if not self._same:
            seen = torch.arange(self._length, device=device) <= self._places_B[:, None]
            self._seen_B11T = seen[:, None, None]
        return self._places_B[:, None]

    def attend(
        self,
        layer_number: int,
        query_BHSD: torch.Tensor,
        key_BGSD: torch.Tensor,
        value_BGSD: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Keep the keys and values of this pass, and return the context of one layer, [B, H, S, D]."""
        if self._places_B is None:
            self._kept[layer_number] = self._begun(key_BGSD), self._begun(value_BGSD)
            return super().attend(layer_number, query_BHSD, key_BGSD, value_BGSD, scale)
        keys, values = self._kept[layer_number]
        if self._same:
            place = self._length - 1
            keys[:, :, place], values[:, :, place] = key_BGSD[:, :, 0], value_BGSD[:, :, 0]
        else:
            keys[self._rows_B, :, self._places_B] = key_BGSD[:, :, 0]
            values[self._rows_B, :, self._places_B] = value_BGSD[:, :, 0]
        return F.scaled_dot_product_attention(
            query_BHSD,
            keys[:, :, : self._length],
            values[:, :, : self._length],
            attn_mask=None if self._same else self._seen_B11T,
            scale=scale,
            enable_gqa=query_BHSD.size(1) != key_BGSD.size(1),
        )

    def _begun(self, heads_BGSD: torch.Tensor) -> torch.Tensor:
        rows, heads, length, channels = heads_BGSD.shape
        kept = heads_BGSD.new_zeros(rows, heads, self.positions, channels)
        kept[:, :, :length] = heads_BGSD
        return kept
