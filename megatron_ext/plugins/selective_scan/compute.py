"""Computes a Mamba-1 layer on plain torch (Gu and Dao 2023, arXiv:2312.00752, algorithm 2 and section 3.4).

    u = silu(convolution(x))        x, z = W_in h        t, B, C = norms of W_x u
    dt = softplus(W_dt t + bias)    h_t = exp(-exp(A_log) dt_t) h_{t-1} + dt_t B_t u_t        h [N] of a channel
    y_t = h_t . C_t + D u_t         output = W_out (y silu(z))

The recurrence of a span is a tree of products (Blelloch 1990, "Prefix sums and their applications", section 1.5): every
two neighbouring positions are one of a recurrence half as long. No factor is above 1, so that nothing overflows. Spans
hand on their last state and are computed again in the backward pass. A document begins with a decay of 0; padding has
a time step of 0, which leaves the state as it is. mamba_ssm's kernels are not needed.

Tensor-parallel ranks divide the channels. W_x has the columns of a rank's channels: the ranks add up its products, and
the gradients of the sums, of which each rank finds the share of its channels.

Shapes: P pieces of S positions, B samples, C channels of this rank, N numbers of a state, K positions of the
convolution, R numbers of a token that all channels share: time steps, B and C.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.distributed import ProcessGroup

from megatron_ext.device.kernels import linear
from megatron_ext.parts.attention.cached import Sequences, WholeSequences
from megatron_ext.parts.linear.compute import BiasedColumnLinear, BiasedRowLinear, ColumnLinear, RowLinear
from megatron_ext.parts.norm.compute import uninitialized
from megatron_ext.plugins.gated_delta.compute import (
    AgainInBackward,
    Weight,
    before_pieces,
    convolved_inputs,
    divided_parameter,
    states,
)
from megatron_ext.plugins.selective_scan.describe import SPAN, SelectiveScan

_NORMS = ("dt_norm", "b_norm", "c_norm")


class Mamba1(MegatronModule):
    """Projects, convolves, scans, gates, and projects the result.

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
        described: SelectiveScan,
        **_unused: object,
    ) -> None:
        super().__init__(config)
        self.described, self.layer_number = described, layer_number
        self.tp_group: Any = pg_collection.tp
        self.cp_group: Any = pg_collection.cp if config.context_parallel_size > 1 else None
        self.checkpoint_core_attention = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or ()
        )
        linear: Any = {"config": config, "bias": described.bias, "tp_group": self.tp_group}
        column, row = (BiasedColumnLinear, BiasedRowLinear) if described.bias else (ColumnLinear, RowLinear)
        first = {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        last = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
        self.in_proj = column(config.hidden_size, 2 * described.channels, **linear, **first)
        self.out_proj = row(described.channels, config.hidden_size, **linear, **last)
        channels = described.channels // self.tp_group.size()
        convolution = (channels, 1, described.kernel), (channels,)
        self.conv1d = Weight(*(divided_parameter(config, *size) for size in convolution[: 1 + described.conv_bias]))
        self.x_proj = Weight(divided_parameter(config, sum(described.shared_sizes), channels, dim=1))
        self.dt_proj = Weight(divided_parameter(config, channels, described.rank), divided_parameter(config, channels))
        self.A_log = divided_parameter(config, channels, described.state_size)
        self.D = divided_parameter(config, channels)
        if described.norm == "with-weights":
            for name, size in zip(_NORMS, described.shared_sizes, strict=True):
                weight = uninitialized(config, size)
                # All ranks compute the same gradient, from all tokens.
                weight.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
                self.add_module(name, Weight(weight))

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
        own: dict[str, Any] = {"A_log": self.A_log, "D": self.D, "x_proj.weight": self.x_proj.weight}
        for name, module in (("conv1d", self.conv1d), ("dt_proj", self.dt_proj)):
            own |= {f"{name}.{kind}": parameter for kind, parameter in module.named_parameters()}
        divided = {**dict.fromkeys(own, 0), "x_proj.weight": 1}
        groups: Any = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return found | make_sharded_tensors_for_checkpoint(own, prefix, divided, sharded_offsets, **groups)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: object = None,
        packed_seq_params: Sequences | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the projected output, [S, B, hidden], and the bias that is still to be added. hidden_states: [S, B,
        hidden]. With `packed_seq_params` states begin anew in each document, or some positions alone are read."""
        assert attention_mask is None, "it sees earlier positions alone"
        mixed_SBM, _ = self.in_proj(hidden_states)
        core: Any = partial(self._core, packed_seq_params)
        if self.checkpoint_core_attention and self.training:
            context: Any = tensor_parallel.checkpoint(core, False, mixed_SBM)
        else:
            context = core(mixed_SBM)
        if packed_seq_params is not None:
            context = packed_seq_params.narrowed(context, self)
        return self.out_proj(context)

    @torch.compiler.disable
    def _core(self, sequences: Sequences | None, mixed_SBM: torch.Tensor) -> torch.Tensor:
        """Return the gated outputs of the scan, [S, B, C]."""
        for module in (self.conv1d, self.x_proj, self.dt_proj):
            module()
        group = self.cp_group
        inference = sequences if isinstance(sequences, WholeSequences) else None
        if inference is not None:
            group = None  # context-parallel ranks have sequences of their own
        pieces, (length, rows, _) = 1 if group is None else 2, mixed_SBM.shape
        mixed_PSBC2 = mixed_SBM.view(pieces, -1, rows, mixed_SBM.size(-1) // 2, 2)
        begins_BS = None if sequences is None else sequences.begins(rows, length)
        begins = None if begins_BS is None else begins_BS.T.unflatten(0, (pieces, -1))
        kept = None if inference is None else inference.recurrent(self.layer_number)
        tail, state = kept or self._begun(mixed_PSBC2)
        tail = tail.squeeze(3)
        convolved = self._convolved(mixed_PSBC2, begins, tail, group)
        shared = self._shared(convolved)
        counted = None if inference is None else inference.counted(length)
        run = partial(self._scanned, mixed_PSBC2, convolved, shared, begins, counted)
        if group is not None:
            _, maps = run(torch.cat((state, torch.ones_like(state)), dim=-1), reads=False)
            state = states(maps, group, torch.mul, 1)
        context_PSBC, state = run(state, reads=True)
        assert context_PSBC is not None, "outputs are asked for"
        if inference is not None:
            inputs = torch.cat((tail, mixed_PSBC2[..., 0]), dim=1)
            inference.keep_recurrent(self.layer_number, inputs.unsqueeze(3), state)
        return context_PSBC.flatten(0, 1)

    def _begun(self, mixed_PSBC2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs of the convolution, [P, K - 1, B, 1, C], and a state, [P, B, C, N, 1], of nothing."""
        pieces, _, rows, channels, _ = mixed_PSBC2.shape
        tail = mixed_PSBC2.new_zeros(pieces, self.described.kernel - 1, rows, 1, channels)
        wide = torch.promote_types(mixed_PSBC2.dtype, torch.float32)
        return tail, mixed_PSBC2.new_zeros(pieces, rows, channels, self.described.state_size, 1, dtype=wide)

    def _convolved(
        self, mixed_PSBC2: torch.Tensor, begins: torch.Tensor | None, tail_PKBC: torch.Tensor, group: Any
    ) -> torch.Tensor:
        """Return silu(convolution(x)), [P, S, B, C], computed span by span.

        Args:
            begins: whether a document begins with each position, [P, S, B].
            tail_PKBC: the K - 1 inputs before each piece; context-parallel ranks ask each other instead.
        """
        outputs, kernel, before, ids = [], self.described.kernel, self.described.kernel - 1, None
        if begins is not None:  # number of each position's document in its piece, K zeros before
            ids = F.pad(begins.cumsum(1), (0, 0, kernel, 0))
        if group is not None and before:
            latest = mixed_PSBC2[:, -before:, ..., 0]
            if ids is not None:  # the next piece goes on with the last document alone
                latest = latest * (ids[:, -before:] == ids[:, -1:])[..., None]
            tail_PKBC = before_pieces(latest, group)
        for start in range(0, mixed_PSBC2.size(1), SPAN):
            first, end = max(start - before, 0), min(start + SPAN, mixed_PSBC2.size(1))
            compute = partial(_convolved_span, kernel, None if ids is None else ids[:, start : end + kernel])
            inputs = mixed_PSBC2[:, first:end], tail_PKBC[:, start:], *self.conv1d.parameters()
            [output] = AgainInBackward.apply(compute, *inputs)  # pyright: ignore
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def _shared(self, convolved_PSBC: torch.Tensor) -> torch.Tensor:
        """Return time steps, B and C of every token, [P, S, B, R], through their norms."""
        weight: Any = self.x_proj.weight
        shared = linear(convolved_PSBC, weight)
        is_divided = self.tp_group.size() > 1
        if is_divided:
            shared = reduce_from_tensor_model_parallel_region(shared, group=self.tp_group)
        if (kind := self.described.norm) != "none":
            modules = [self.get_submodule(name) for name in _NORMS] if kind == "with-weights" else []
            for module in modules:
                module()
            weights = [parameter for module in modules for parameter in module.parameters()]
            compute = partial(_normed, self.described)
            [shared] = AgainInBackward.apply(compute, shared, *weights)  # pyright: ignore
        return copy_to_tensor_model_parallel_region(shared, group=self.tp_group) if is_divided else shared

    def _scanned(
        self,
        mixed_PSBC2: torch.Tensor,
        convolved_PSBC: torch.Tensor,
        shared_PSBR: torch.Tensor,
        begins: torch.Tensor | None,
        counted_SB: torch.Tensor | None,
        state: torch.Tensor,
        *,
        reads: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the gated outputs, [P, S, B, C], or None where nothing `reads` the states, and the state after the
        last position, computed span by span.

        Args:
            begins: whether a document begins with each position, [P, S, B].
            counted_SB: 1 for positions that change the state, 0 for others; None: all do.
            state: the state before the first position, [P, B, C, N, 1]; with a second column, a factor of the state
                before the piece.
        """
        outputs, own = [], (*self.dt_proj.parameters(), self.A_log, *((self.D,) if reads else ()))
        for start in range(0, mixed_PSBC2.size(1), SPAN):
            span = slice(start, start + SPAN)
            counted = None if counted_SB is None else counted_SB[span]
            compute = partial(_span, self.described, None if begins is None else begins[:, span], counted)
            inputs = mixed_PSBC2[:, span], convolved_PSBC[:, span], shared_PSBR[:, span], state
            output, state = AgainInBackward.apply(compute, *inputs, *own)  # pyright: ignore
            outputs.append(output)
        return (torch.cat(outputs, dim=1) if reads else None), state


def _convolved_span(
    kernel: int,
    ids: torch.Tensor | None,
    mixed_PSBC2: torch.Tensor,
    tail_PKBC: torch.Tensor,
    weight: torch.Tensor,
    *bias: torch.Tensor,
) -> tuple[torch.Tensor]:
    """Return silu(convolution(x)) at the last positions of mixed_PSBC2, those that have K - 1 inputs before them."""
    wide = torch.promote_types(mixed_PSBC2.dtype, torch.float32)
    inputs = torch.cat((tail_PKBC, mixed_PSBC2[..., 0]), dim=1).to(wide)
    convolved = convolved_inputs(inputs.unsqueeze(3), weight.to(wide).view(1, -1, kernel), ids).squeeze(3)
    for one in bias:
        convolved = convolved + one.to(wide)
    return (F.silu(convolved).to(mixed_PSBC2.dtype),)


def _normed(described: SelectiveScan, shared_PSBR: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
    """Return time steps, B and C, each normalized by RMSNorm."""
    wide = torch.promote_types(shared_PSBR.dtype, torch.float32)
    parts = shared_PSBR.to(wide).split(described.shared_sizes, dim=-1)
    normed = [F.rms_norm(part, part.shape[-1:], eps=described.epsilon) for part in parts]
    if weights:
        normed = [part * weight.to(wide) for part, weight in zip(normed, weights, strict=True)]
    return (torch.cat(normed, dim=-1).to(shared_PSBR.dtype),)


def _span(
    described: SelectiveScan,
    begins: torch.Tensor | None,
    counted_SB: torch.Tensor | None,
    mixed_PSBC2: torch.Tensor,
    convolved_PSBC: torch.Tensor,
    shared_PSBR: torch.Tensor,
    state_PBCNX: torch.Tensor,
    dt_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    *skip: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the gated outputs of a span, [P, S, B, C], or None without a skip, and the state after it."""
    wide = state_PBCNX.dtype
    steps, b, c = shared_PSBR.split(described.shared_sizes, dim=-1)
    dt = F.softplus(F.linear(steps, dt_weight).to(wide) + dt_bias.to(wide))
    if counted_SB is not None:
        dt = dt * counted_SB[..., None]
    dt, u, b, c = (x.transpose(0, 1).to(wide) for x in (dt, convolved_PSBC, b, c))  # [S, P, B, ...]
    rates = -a_log.to(wide).exp()
    decay = (dt[..., None] * rates).exp()
    if begins is not None:
        decay = decay * ~begins.transpose(0, 1)[..., None, None]
    added = (dt * u)[..., None] * b[..., None, :]
    first = added[:1] + decay[:1] * state_PBCNX[None, ..., 0]
    found: Any = LinearRecurrence.apply(decay, torch.cat((first, added[1:])))
    last = found[-1].clone().unsqueeze(-1)  # nothing of the other states is kept with it
    if not skip:
        factor = (dt.sum(0)[..., None] * rates).exp()
        if begins is not None:
            factor = factor * ~begins.any(1)[..., None, None]
        return None, torch.cat((last, factor.unsqueeze(-1) * state_PBCNX[..., 1:]), dim=-1)
    output = (found @ c[..., None]).squeeze(-1) + skip[0].to(wide) * u
    output = output.transpose(0, 1) * F.silu(mixed_PSBC2[..., 1].to(wide))
    return output.to(mixed_PSBC2.dtype), last


class LinearRecurrence(torch.autograd.Function):
    """Computes h_t = a_t h_{t-1} + b_t from h_{-1} = 0 along the first dimension, element by element. Its gradient is
    the same recurrence from the end: g_t = a_{t+1} g_{t+1} + (gradient of h_t)."""

    @staticmethod
    def forward(ctx: Any, decay_S: torch.Tensor, added_S: torch.Tensor) -> torch.Tensor:
        found = _recurrence(decay_S, added_S)
        ctx.save_for_backward(decay_S, found)
        return found

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, found = ctx.saved_tensors
        following = torch.cat((decay[1:], torch.zeros_like(decay[:1])))
        of_added = _recurrence(following.flip(0), gradient_S.flip(0)).flip(0)
        of_decay = torch.cat((torch.zeros_like(found[:1]), of_added[1:] * found[:-1]))
        return of_decay, of_added


def _recurrence(decay_S: torch.Tensor, added_S: torch.Tensor) -> torch.Tensor:
    """Return h_t = a_t h_{t-1} + b_t of all positions: pairs of positions are a recurrence half as long, whose results
    are the second states of each pair, from which the first ones of the next pairs follow."""
    length = decay_S.size(0)
    if length == 1:
        return added_S
    pairs = length // 2
    (a, other_a), (b, other_b) = (x[: 2 * pairs].unflatten(0, (-1, 2)).unbind(1) for x in (decay_S, added_S))
    second = _recurrence(other_a * a, torch.addcmul(other_b, other_a, b))
    found = torch.empty_like(added_S)
    found[1::2], found[0] = second, added_S[0]
    found[2::2] = torch.addcmul(added_S[2::2], decay_S[2::2], second[: (length - 1) // 2])
    return found


def mixer_spec(described: SelectiveScan, _tp_group: ProcessGroup, _columns: slice | None) -> ModuleSpec:
    """Return the spec of a layer's Mamba-1 mixer."""
    # Depths of multi-token prediction ask a mixer for its mask.
    return ModuleSpec(Mamba1, {"attn_mask_type": AttnMaskType.causal, "described": described})
