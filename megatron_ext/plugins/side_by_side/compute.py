"""Computes attention and Mamba-2 side by side, as Falcon-H1 does (arXiv:2507.22448, section 2.1)."""

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.distributed import ProcessGroup

from megatron_ext.parts.attention.build import attention_spec
from megatron_ext.parts.attention.cached import Sequences
from megatron_ext.parts.attention.compute import CausalSelfAttention
from megatron_ext.parts.linear.compute import leave_sums, summed
from megatron_ext.plugins.mamba.compute import Mamba2
from megatron_ext.plugins.side_by_side.describe import SideBySide


class AttentionAndMamba(CausalSelfAttention):
    """Gives a attention(x) + b Mamba2(x), which tensor-parallel ranks add up in one exchange. Its arguments are
    attention's."""

    def __init__(self, *positional: Any, described: SideBySide, **settings: Any) -> None:
        super().__init__(*positional, described=described, **settings)
        self.mamba = Mamba2(self.config, self.layer_number, self.pg_collection, described=described.mamba)
        self.multipliers = described.multipliers
        leave_sums(self.linear_proj, self.mamba.out_proj)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | Any = None,
        packed_seq_params: Sequences | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum of both mixers' outputs times their multipliers, [S, B, hidden], and the bias that must still
        be added, if any. hidden_states: [S, B, hidden]; the other arguments are as in attention."""
        of_attention, of_mamba = self.multipliers
        # First: what Mamba-2 computes again in the backward pass then comes when attention holds nothing any more.
        recurrent, _ = self.mamba(hidden_states, attention_mask, None, packed_seq_params)
        attended, bias = super().forward(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params)
        output = summed(of_attention * attended + of_mamba * recurrent, self.linear_proj)
        return output, None if bias is None else of_attention * bias


def mixer_spec(described: SideBySide, tp_group: ProcessGroup, columns: slice | None) -> ModuleSpec:
    """Return the spec of a layer's attention and Mamba-2; `columns` is attention's part of the table of angles."""
    return attention_spec(described, tp_group, columns, AttentionAndMamba)
