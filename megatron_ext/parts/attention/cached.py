"""Objects that a forward pass carries through the layers: how its tokens see each other, and where it is read.

In training that is nothing, or `Sequences`. Without training there are three: `WholeSequences` attends as
training does, `TextsInARow` within each of several texts that need not be filled up to one length, and `KeyValueCache`
keeps keys and values, so that each further token costs one position. Rows of a batch begin at position 0 and are filled
up at their end: causal attention then needs no mask until the first generated token. In the cache they end together, so
that one place is written for all rows, and what a row does not see is the same at every step.

Shape legend: B rows, S positions of this pass, H query heads, G key/value heads, D channels of a head, T places in
the cache, N positions that are read, V vocabulary of this tensor-parallel rank.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from megatron_ext.data.packing import Documents
from megatron_ext.parts.attention.blocks import widened
from megatron_ext.parts.attention.scores import PLAIN, Scores, forward, with_sink
from megatron_ext.parts.attention.segments import attend_window

Project = Callable[[torch.Tensor], torch.Tensor]
"""Maps hidden states [N, hidden] to logits [N, V]."""

Hides = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""Maps the keys of the first head, [B, T, D], and the additive mask of all scores, [B, 1, 1 or S, T], to the additive
mask of these queries."""


class Sequences:
    """Documents that lie end to end in the sequences of training, none of which sees another."""

    def __init__(self, documents: Documents):
        self.documents = documents

    def attention(self, core: Any, layer_number: int) -> Callable[..., torch.Tensor]:
        """Return the attention function of a layer, in place of its `core`: from queries [B, H, S, D], keys and values
        [B, G, S, D] to the context, [S, B, H x D]."""
        return partial(core, documents=self.documents)

    def begins(self, rows: int, length: int) -> torch.Tensor | None:
        """Return whether a document begins with each position, bool [rows, length]; None where only rows do."""
        begins = self.documents.begins_BS
        assert begins.shape == (rows, length), "documents and hidden states are of the positions that a rank holds"
        return begins

    def narrowed(self, states_SBH: torch.Tensor, module: Any) -> torch.Tensor:
        """Return the states that a layer, or its attention, goes on with where it computes each position by itself."""
        return states_SBH


class WholeSequences(Sequences):
    """Attends within whole sequences, and returns logits at the positions of `wanted`.

    Args:
        wanted: int64 [N], numbers s x B + b of the positions to read, on the device.
    """

    def __init__(self, wanted: torch.Tensor):
        self.wanted: torch.Tensor | None = wanted
        self._last_layer: int | None = None
        self._is_narrow = False

    @property
    def goes_on(self) -> bool:
        """Whether this pass is over a few tokens of each row, after tokens whose keys and values are kept."""
        return False

    def keep(self, layer_number: int, latents_B1SD: torch.Tensor, rank: int) -> None:
        """Keep the latents from which one layer's keys and values are computed, if anything is kept.

        Args:
            latents_B1SD: one key head for all query heads; its first `rank` channels are the values.
        """

    def begins(self, rows: int, length: int) -> torch.Tensor | None:
        """Return whether a text begins with each position, bool [rows, length]; None where only rows do."""
        return None

    def counted(self, length: int) -> torch.Tensor | None:
        """Return 1 for the tokens of each row and 0 for padding, [length, rows], if that must be known."""
        return None

    def recurrent(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the latest inputs and the state that a layer with a recurrence continues from; None in a first
        pass."""
        return None

    def keep_recurrent(self, layer_number: int, inputs_PSBGX: torch.Tensor, state: torch.Tensor) -> None:
        """Keep inputs and state of a recurrence, if anything is kept.

        Args:
            inputs_PSBGX: the inputs of this pass, [1, S, B, G, X], after as many as there were to go on from.
        """

    def begin(self, last_layer: int | None) -> None:
        """Begin the pass through a model chunk.

        Args:
            last_layer: number of the model's last layer; None if the chunk does not have it.
        """
        self._last_layer, self._is_narrow = last_layer, False

    def attention(self, core: Any, layer_number: int) -> Callable[..., torch.Tensor]:
        """Return `attend` with the scale, window and scores of the core, which attends in training and computes
        gradients."""
        how = {"scale": core.softmax_scale, "window": core.window, "scores": core.scores}
        return partial(self.attend, layer_number, **how)

    def attend(
        self,
        layer_number: int,
        *heads: torch.Tensor,
        scale: float | None,
        window: int | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        """Return the context of one layer, [S, B, H x D], in which a query sees the latest `window` keys, or all.

        Args:
            heads: queries [B, H, S, D], keys and values [B, G, S, D].
        """
        query_BHSD, key_BGSD, value_BGSV = heads
        factor: float = query_BHSD.size(-1) ** -0.5 if scale is None else scale
        if not scores.are_plain or (window is not None and window < query_BHSD.size(2)):
            context = attend_window(query_BHSD, key_BGSD, value_BGSV, factor, window, scores)
        else:
            query, key, value = widened(*heads)
            context = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=factor, enable_gqa=query.size(1) != key.size(1)
            )[..., : value_BGSV.size(-1)]
        return context.permute(2, 0, 1, 3).flatten(2)

    def narrowed(self, states_SBH: torch.Tensor, module: Any) -> torch.Tensor:
        """Return the states as they are, or in the model's last layer the states at `wanted` alone, [N, 1, hidden]."""
        if module.layer_number != self._last_layer:
            return states_SBH
        self._is_narrow = True
        return self._of_wanted(states_SBH)

    def hidden(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output at the positions of `wanted`, [N, hidden]."""
        return (hidden_SBH if self._is_narrow else self._of_wanted(hidden_SBH)).flatten(0, 1)

    def read(self, hidden_SBH: torch.Tensor, project: Project) -> torch.Tensor:
        """Return the result of the last stage: the logits, [N, V]."""
        return project(self.hidden(hidden_SBH))

    def _of_wanted(self, states_SBH: torch.Tensor) -> torch.Tensor:
        if self.wanted is None:
            return states_SBH
        return states_SBH.flatten(0, 1).index_select(0, self.wanted)[:, None]


class TextsInARow(WholeSequences):
    """Attends within texts that are one after another in a single row, and returns logits at the end of each.

    Args:
        lengths: tokens of each text.
        filled: tokens after them, which nobody reads.
        device: where the pass is made.
    """

    def __init__(self, lengths: list[int], filled: int, device: torch.device):
        super().__init__(torch.tensor(lengths, device=device).cumsum(0) - 1)
        self._device = device
        self._lengths = [*lengths, filled] if filled else lengths

    def begins(self, rows: int, length: int) -> torch.Tensor | None:
        """Return whether a text begins with each position, bool [1, length]."""
        begins = torch.zeros(1, length, dtype=torch.bool)
        begins[0, [0, *accumulate(self._lengths[:-1])]] = True
        return begins.to(self._device)

    def attend(
        self,
        layer_number: int,
        *heads: torch.Tensor,
        scale: float | None,
        window: int | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        """Return the context of one layer, [S, 1, H x D]."""
        texts = zip(*(one.split(self._lengths, dim=2) for one in heads), strict=True)
        attend = partial(super().attend, layer_number, scale=scale, window=window, scores=scores)
        return torch.cat([attend(*of_text) for of_text in texts])


class KeyValueCache(WholeSequences):
    """Keeps keys and values of every layer of this rank: 2 x layers x B x G x D x `positions` numbers, with B rows, G
    key/value heads and D channels of a head. Latent attention keeps its latents instead (`keep`), and a recurrence its
    state (`keep_recurrent`), whose size does not depend on `positions`.

    The first pass takes the prompts, each further pass the next token or tokens of every row (`advance`); a row may
    then forget its latest tokens (`take_back`).

    Args:
        positions: the largest number of positions of a row, prompt and generated tokens together.
        lengths: tokens of each row's prompt.
        width: tokens of each row in the first pass, padding included.
        device: the device of the first pass.
    """

    def __init__(self, positions: int, lengths: list[int], width: int, device: torch.device):
        lengths_B = torch.tensor(lengths, device=device)
        super().__init__((lengths_B - 1) * len(lengths) + torch.arange(len(lengths), device=device))
        self.positions = positions
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._recurrent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._next_B1, self._length = lengths_B[:, None], width
        self._is_first = True
        self._source_B1S1: torch.Tensor | None = None
        self._unseen_B11T: torch.Tensor | None = None
        if min(lengths) < width:
            shift_B = width - lengths_B
            source_BS = torch.arange(width, device=device) - shift_B[:, None]
            self._source_B1S1 = source_BS.clamp_(min=0)[:, None, :, None]
            self._unseen_B11T = self._unseen_before(shift_B)

    @property
    def goes_on(self) -> bool:
        """Whether this pass is over a few tokens of each row, after tokens whose keys and values are kept."""
        return not self._is_first

    def keep(self, layer_number: int, latents_B1SD: torch.Tensor, rank: int) -> None:
        """Keep latents in place of keys and values: `positions` x D numbers of a row. The values are part of them."""
        kept = self._first_of_cache(latents_B1SD)
        self._kept[layer_number] = kept, kept[..., :rank]

    def counted(self, length: int) -> torch.Tensor | None:
        """Return 1 for the tokens of each row and 0 for padding, [length, rows], if that must be known."""
        if self.goes_on or self._source_B1S1 is None:
            return None
        return (torch.arange(length, device=self._next_B1.device) < self._next_B1).T.float()

    def recurrent(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a layer's latest inputs, [1, K, B, G, X], and its state; None in the first pass."""
        return self._recurrent[layer_number] if self.goes_on else None

    def keep_recurrent(self, layer_number: int, inputs_PSBGX: torch.Tensor, state: torch.Tensor) -> None:
        """Keep the state, which is that after the last token of each row, and the inputs of its latest tokens."""
        [inputs_SBGX] = inputs_PSBGX
        latest_B = torch.ones_like(self._next_B1[:, 0]) if self.goes_on else self._next_B1[:, 0]
        kept = len(inputs_SBGX) - (1 if self.goes_on else self._length)
        places = torch.arange(kept, device=latest_B.device)[:, None] + latest_B
        rows = torch.arange(len(latest_B), device=latest_B.device)
        self._recurrent[layer_number] = inputs_SBGX[places, rows][None], state

    def advance(self, tokens: int = 1) -> torch.Tensor:
        """Prepare a pass over the next tokens of each row, and return their positions, int64 [B, tokens]."""
        assert self._length + tokens <= self.positions, "the cache was made for fewer positions"
        positions = self._next_B1 + torch.arange(tokens, device=self._next_B1.device)
        self._is_first, self.wanted = False, None
        self._next_B1, self._length = self._next_B1 + tokens, self._length + tokens
        return positions

    def take_back(self, tokens: Sequence[int]) -> None:
        """Forget the latest tokens of each row, as many as it says; the kept keys and values are moved so that all rows
        end together. A recurrence, whose state has no way back, cannot."""
        assert not self._recurrent, "validated: a state cannot be taken back"
        back_B = torch.tensor(tokens, device=self._next_B1.device)
        self._next_B1 = self._next_B1 - back_B[:, None]
        length = int(self._next_B1.max())
        shift_B = back_B + (length - self._length)
        self._length = length
        if not shift_B.any():
            return
        source_BT = torch.arange(self.positions, device=shift_B.device) - shift_B[:, None]
        source_B1T1 = source_BT.clamp_(0, self.positions - 1)[:, None, :, None]
        for pair in self._kept.values():
            # Values that are a part of the keys begin where these do, and are moved with them.
            for kept in {one.data_ptr(): one for one in reversed(pair)}.values():
                kept.copy_(kept.gather(2, source_B1T1.expand(kept.shape)))
        self._unseen_B11T = self._unseen_before(length - self._next_B1[:, 0])

    def attend(
        self,
        layer_number: int,
        *heads: torch.Tensor,
        scale: float | None,
        window: int | None = None,
        scores: Scores = PLAIN,
        hides: Hides | None = None,
    ) -> torch.Tensor:
        """Keep the keys and values of this pass, and return the context of one layer, [S, B, H x D].

        Args:
            hides: for a pass after kept tokens: returns the additive mask that hides more keys, from the keys and the
                mask so far.
        """
        query_BHSD, key_BGSD, value_BGSD = heads
        if self._is_first:
            if layer_number not in self._kept:
                self._kept[layer_number] = self._first_of_cache(key_BGSD), self._first_of_cache(value_BGSD)
            return super().attend(layer_number, *heads, scale=scale, window=window, scores=scores)
        rows, groups, tokens, channels = key_BGSD.shape
        first = 0 if window is None else max(0, self._length - tokens + 1 - window)
        keys_BGTD, values_BGTD = (kept[:, :, first : self._length] for kept in self._kept[layer_number])
        keys_BGTD[:, :, -tokens:], values_BGTD[:, :, -tokens:] = key_BGSD, value_BGSD
        unseen = self._unseen(query_BHSD.dtype, first)
        if tokens > 1:
            unseen = self._unseen_within(query_BHSD, first, window) + (0.0 if unseen is None else unseen)
        if hides is not None:
            unseen = hides(keys_BGTD[:, 0], unseen)
        if not scores.are_plain:
            places = torch.arange(first, self._length, device=query_BHSD.device)
            block = forward(
                *(query_BHSD, keys_BGTD, values_BGTD),
                causal=False,
                scale=channels**-0.5 if scale is None else scale,
                mask_QK=unseen,
                scores=scores,
                places=(places[-tokens:], places),
            )
            return with_sink(*block, scores.sink_H)[0].permute(2, 0, 1, 3).flatten(2)
        # The query heads that share a key's are as many positions that see the same.
        query = query_BHSD.reshape(rows, groups, -1, channels)
        if unseen is not None and tokens > 1:
            unseen = unseen.repeat(1, 1, query.size(2) // tokens, 1)
        context = F.scaled_dot_product_attention(query, keys_BGTD, values_BGTD, attn_mask=unseen, scale=scale)
        return context.view(rows, -1, tokens, context.size(-1)).permute(2, 0, 1, 3).flatten(2)

    def _unseen_within(self, query_BHSD: torch.Tensor, first: int, window: int | None) -> torch.Tensor:
        """Return -infinity for the places, from `first` on, that a query of this pass does not see, being before them
        or further behind than its window, and 0 for others, [1, 1, S, T]."""
        places_T = torch.arange(first, self._length, device=query_BHSD.device)
        own_S1 = places_T[-query_BHSD.size(2) :, None]
        hidden_ST = places_T > own_S1
        if window is not None:
            hidden_ST |= places_T <= own_S1 - window
        return query_BHSD.new_zeros(hidden_ST.shape).masked_fill_(hidden_ST, -torch.inf)[None, None]

    def _unseen_before(self, first_B: torch.Tensor) -> torch.Tensor:
        """Return -infinity for the places before the first token of each row, and 0 for others, fp32 [B, 1, 1, T]."""
        unseen_BT = torch.arange(self.positions, device=first_B.device) < first_B[:, None]
        return torch.zeros(unseen_BT.shape, device=first_B.device).masked_fill_(unseen_BT, -torch.inf)[:, None, None]

    def _unseen(self, dtype: torch.dtype, first: int) -> torch.Tensor | None:
        """Return -infinity for the places, from `first` on, before a row's first token, and 0 for others; None where
        there are none."""
        if self._unseen_B11T is None:
            return None
        if self._unseen_B11T.dtype != dtype:
            self._unseen_B11T = self._unseen_B11T.to(dtype)
        return self._unseen_B11T[..., first : self._length]

    def _first_of_cache(self, heads_BGSD: torch.Tensor) -> torch.Tensor:
        rows, heads, length, channels = heads_BGSD.shape
        kept = heads_BGSD.new_zeros(rows, heads, self.positions, channels)
        if self._source_B1S1 is not None:
            heads_BGSD = heads_BGSD.gather(2, self._source_B1S1.expand(heads_BGSD.shape))
        kept[:, :, :length] = heads_BGSD
        return kept
