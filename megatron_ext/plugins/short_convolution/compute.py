"""Computes the gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404, section 2) on plain torch.

    u_t = B_t * x_t        y_t = C_t * sum_k weight_k * u_{t-K+1+k} (+ bias)        B, C, x = W_in h (+ bias)
    output = W_out y (+ bias)

The convolution is the same as in a gated delta rule (`plugins/gated_delta/compute.py`): a sum over the latest K
positions of the same document, in fp32. Everything between the projections is computed again in the backward pass, span
by span. Context-parallel ranks gather the last K - 1 inputs of each of their two pieces of a sample; generation keeps
the last K - 1 inputs of each row.

Shapes: P pieces of S positions, B samples, C channels of this rank, K positions of the convolution.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.distributed import ProcessGroup

from megatron_ext.parts.attention.cached import Sequences, WholeSequences
from megatron_ext.parts.linear.compute import BiasedColumnLinear, BiasedRowLinear, ColumnLinear, RowLinear
from megatron_ext.plugins.gated_delta.compute import (
    AgainInBackward,
    Weight,
    before_pieces,
    convolved_inputs,
    divided_parameter,
)
from megatron_ext.plugins.short_convolution.describe import SPAN, ShortConvolution


class GatedShortConvolution(MegatronModule):
    """Projects, gates, convolves, gates, and projects the result.

    Args:
        described: its description.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        *,
        described: ShortConvolution,
        **_unused: object,
    ) -> None:
        super().__init__(config)
        self.described, self.layer_number = described, layer_number
        self.tp_group: Any = pg_collection.tp
        self.cp_group: Any = pg_collection.cp if config.context_parallel_size > 1 else None
        linear: Any = {"config": config, "bias": described.bias, "tp_group": self.tp_group}
        column, row = (BiasedColumnLinear, BiasedRowLinear) if described.bias else (ColumnLinear, RowLinear)
        first = {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        last = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
        self.in_proj = column(config.hidden_size, 3 * described.channels, **linear, **first)
        self.out_proj = row(described.channels, config.hidden_size, **linear, **last)
        channels = described.channels // self.tp_group.size()
        shapes = ((channels, 1, described.kernel), (channels,))[: 1 + described.bias]
        self.conv1d = Weight(*(divided_parameter(config, *shape) for shape in shapes))

    @property
    def linear_proj(self) -> RowLinear:
        """The output projection, by the name that attention has for it."""
        return self.out_proj

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the parameters as megatron-core's checkpoints take them."""
        assert metadata is not None, "which ranks hold the same?"
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {f"conv1d.{name}": parameter for name, parameter in self.conv1d.named_parameters()}
        groups: Any = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        divided = dict.fromkeys(own, 0)
        return found | make_sharded_tensors_for_checkpoint(own, prefix, divided, sharded_offsets, **groups)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: object = None,
        packed_seq_params: Sequences | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the projected output, [S, B, hidden], and the bias that is still to be added. hidden_states: [S, B,
        hidden]. With `packed_seq_params` a document sees nothing before it, or some positions alone are read."""
        assert attention_mask is None, "it sees earlier positions alone"
        mixed_SBM, _ = self.in_proj(hidden_states)
        core: Any = self._core
        context = core(packed_seq_params, mixed_SBM)
        if packed_seq_params is not None:
            context = packed_seq_params.narrowed(context, self)
        return self.out_proj(context)

    @torch.compiler.disable
    def _core(self, sequences: Sequences | None, mixed_SBM: torch.Tensor) -> torch.Tensor:
        """Return C * convolution(B * x), [S, B, C]."""
        self.conv1d()
        group, before = self.cp_group, self.described.kernel - 1
        inference = sequences if isinstance(sequences, WholeSequences) else None
        if inference is not None:
            group = None  # context-parallel ranks have sequences of their own
        pieces, (length, rows, _) = 1 if group is None else 2, mixed_SBM.shape
        mixed_PSBM = mixed_SBM.view(pieces, -1, rows, mixed_SBM.size(-1))
        begins_BS = None if sequences is None else sequences.begins(rows, length)
        ids = None
        if begins_BS is not None:
            ids = F.pad(begins_BS.T.unflatten(0, (pieces, -1)).cumsum(1), (0, 0, before + 1, 0))
        tail = mixed_SBM.new_zeros(pieces, before, rows, mixed_SBM.size(-1) // 3)
        kept = None if inference is None else inference.recurrent(self.layer_number)
        if kept is not None:
            tail = kept[0].squeeze(3)
        if group is not None and before:
            latest = _gated(mixed_PSBM[:, -before:])
            if ids is not None:  # the next piece goes on with the last document alone
                latest = latest * (ids[:, -before:] == ids[:, -1:])[..., None]
            tail = before_pieces(latest, group)
        if inference is not None:
            inputs = torch.cat((tail, _gated(mixed_PSBM)), dim=1)
            inference.keep_recurrent(self.layer_number, inputs.unsqueeze(3), tail.new_zeros(0))
        return self._spans(mixed_PSBM, ids, tail).flatten(0, 1)

    def _spans(self, mixed_PSBM: torch.Tensor, ids: torch.Tensor | None, tail_PKBC: torch.Tensor) -> torch.Tensor:
        """Return the outputs span by span, [P, S, B, C]: each reads the K - 1 positions before it once more.

        Args:
            ids: number of each position's document in its piece, with K zeros before, [P, K + S, B].
            tail_PKBC: inputs of the convolution before each piece, K - 1 of them.
        """
        outputs, kernel = [], self.described.kernel
        for start in range(0, mixed_PSBM.size(1), SPAN):
            first = max(start - kernel + 1, 0)
            end = min(start + SPAN, mixed_PSBM.size(1))
            compute = partial(_span, kernel, None if ids is None else ids[:, start : end + kernel])
            inputs = mixed_PSBM[:, first:end], tail_PKBC[:, start:], *self.conv1d.parameters()
            [output] = AgainInBackward.apply(compute, *inputs)  # pyright: ignore
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def _gated(mixed_PSBM: torch.Tensor) -> torch.Tensor:
    """Return B * x, the inputs of the convolution, [P, S, B, C]."""
    b, _, x = mixed_PSBM.unflatten(-1, (-1, 3)).unbind(-1)
    return b * x


def _span(
    kernel: int,
    ids: torch.Tensor | None,
    mixed_PSBM: torch.Tensor,
    tail_PKBC: torch.Tensor,
    weight: torch.Tensor,
    *bias: torch.Tensor,
) -> tuple[torch.Tensor]:
    """Return C * convolution(B * x) at the last positions of mixed_PSBM, those that have K - 1 inputs before them."""
    wide = torch.promote_types(mixed_PSBM.dtype, torch.float32)
    inputs = torch.cat((tail_PKBC, _gated(mixed_PSBM)), dim=1).to(wide)
    convolved = convolved_inputs(inputs.unsqueeze(3), weight.to(wide).view(1, -1, kernel), ids).squeeze(3)
    for one in bias:
        convolved = convolved + one.to(wide)
    c = mixed_PSBM.unflatten(-1, (-1, 3))[:, -convolved.size(1) :, ..., 1]
    return (c * convolved.to(mixed_PSBM.dtype),)  # as a convolution of 16-bit numbers rounds


def mixer_spec(described: ShortConvolution, _tp_group: ProcessGroup, _columns: slice | None) -> ModuleSpec:
    """Return the spec of a layer's gated short convolution."""
    # Depths of multi-token prediction ask a mixer for its mask.
    return ModuleSpec(GatedShortConvolution, {"attn_mask_type": AttnMaskType.causal, "described": described})
