"""Computes a Mamba-2 layer on plain torch (Dao and Gu 2024, arXiv:2405.21060, figure 6, parallel form; section 6).

    h_t = exp(-exp(A_log) dt_t) h_{t-1} + dt_t B_t x_t^T        dt_t = softplus(step_t + dt_bias), h [N, P] of a head
    y_t = h_t^T C_t + D x_t
    output = W RMSNorm(y silu(z)), over the channels of a group

It is the gated delta rule without its correction, and computed as one (`plugins/gated_delta/compute.py`, with its
shapes): short convolution, spans that are computed again in the backward pass, documents, generation, and what
context-parallel ranks hand on. Rows of the projection lie group by group, x, B, C, z, dt, where Megatron's and Hugging
Face's have all z, then all x, and so on; tensor-parallel ranks divide all of it by groups. megatron-core's MambaMixer
needs `mamba_ssm` and a GPU.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.distributed import ProcessGroup

from megatron_ext.plugins.gated_delta.compute import (
    GatedDeltaNet,
    Weight,
    convolved_inputs,
    divided_parameter,
    documents_of_span,
    states,
)
from megatron_ext.plugins.gated_delta.rule import rule_of
from megatron_ext.plugins.mamba.describe import Mamba


class Mamba2(GatedDeltaNet):
    """Projects, convolves, applies the recurrence, gates, normalizes, and projects the result. It takes the arguments
    of `GatedDeltaNet`."""

    divided = ("conv1d.weight", "dt_bias", "A_log", "conv1d.bias")

    def __init__(self, *positional: Any, **settings: Any) -> None:
        super().__init__(*positional, **settings)
        ranks, described = self.tp_group.size(), cast(Mamba, self.described)
        channels, heads, width = (
            size // ranks for size in (described.convolved_size, described.value_heads, described.context_size)
        )
        self.conv1d = Weight(self.conv1d.weight, divided_parameter(self.config, channels))
        self.D = divided_parameter(self.config, heads)
        self.divided_for_reading = ("D",) if described.norm_place == "none" else ("D", "out_norm.weight")
        self.out_norm = Weight(*(divided_parameter(self.config, width) for _ in self.divided_for_reading[1:]))

    @property
    def compute_span(self) -> Callable[..., tuple[torch.Tensor | None, torch.Tensor]]:
        """Function that computes a span, with the arguments of `_span`."""
        return _span

    def states_before(self, run: Any, tail: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the state before each of this rank's pieces. A piece maps a state to a factor times it plus a sum."""
        _, maps = run(tail, torch.cat((state, torch.ones_like(state[..., :1])), dim=-1), ())
        return states(maps, self.cp_group, torch.mul, 1)


def _span(
    described: Mamba,
    ids: torch.Tensor | None,
    counted_SB: torch.Tensor | None,
    mixed_PSBGM: torch.Tensor,
    tail_PKBGX: torch.Tensor,
    state: torch.Tensor,
    conv_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    conv_bias: torch.Tensor,
    *reading: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the outputs of a span, [P, S, B, G x R x P], or None without parameters for them, and the state after
    it."""
    groups, per_key, wide = mixed_PSBGM.size(3), described.per_key, state.dtype
    values = per_key * described.value_size
    mixed, gate, step = mixed_PSBGM.split((tail_PKBGX.size(-1), values, per_key), dim=-1)
    inputs = torch.cat((tail_PKBGX, mixed), dim=1).to(wide)
    of_gate, *factors, of_step = described.multipliers
    weight_GXK = conv_weight.to(wide).view(groups, -1, described.kernel)
    if described.multipliers != (1.0,) * 5:  # by channel: the convolution has a weight for each
        sections = weight_GXK.split((values, described.key_size, described.key_size), dim=1)
        weight_GXK = torch.cat([factor * one for factor, one in zip(factors, sections, strict=True)], dim=1)
        gate, step = of_gate * gate, of_step * step
    convolved = convolved_inputs(inputs, weight_GXK, ids)
    convolved = F.silu(convolved + conv_bias.to(wide).view(groups, -1))
    convolved = convolved.to(mixed_PSBGM.dtype).to(wide)  # as a convolution of 16-bit numbers rounds
    x, b, c = convolved.split((values, described.key_size, described.key_size), dim=-1)
    b, c = (one.permute(0, 2, 3, 1, 4).unsqueeze(3) for one in (b, c))
    x = x.unflatten(-1, (per_key, -1)).permute(0, 2, 3, 4, 1, 5)
    of_heads = (groups, per_key, 1, 1)
    dt = F.softplus(step.permute(0, 2, 3, 4, 1).unsqueeze(-1).to(wide) + dt_bias.to(wide).view(of_heads))
    if counted_SB is not None:
        dt = dt * counted_SB.T[None, :, None, None, :, None]
    log_decay = -a_log.to(wide).exp().view(of_heads) * dt
    documents = documents_of_span(ids, described.kernel)
    added = F.pad(dt * x, (0, state.size(-1) - described.value_size))
    rule = rule_of(described, mixed_PSBGM.dtype)
    read, state = rule(c if reading else None, b, added, log_decay, None, state, documents)
    if read is None:
        return None, state
    skip, *norm = (one.to(wide) for one in reading)
    output, opened = (read + skip.view(of_heads) * x).permute(0, 4, 1, 2, 3, 5).flatten(4), F.silu(gate.to(wide))
    if described.norm_place != "before-gate":
        output = output * opened
    for weight in norm:
        output = F.rms_norm(output, (values,), eps=described.norm.epsilon) * weight.view(groups, -1)
    if described.norm_place == "before-gate":
        output = output * opened
    return output.flatten(3).to(mixed_PSBGM.dtype), state


def mixer_spec(described: Mamba, _tp_group: ProcessGroup, _columns: slice | None) -> ModuleSpec:
    """Return the spec of a layer's Mamba-2 mixer."""
    # Depths of multi-token prediction ask a mixer for its mask.
    return ModuleSpec(Mamba2, {"attn_mask_type": AttnMaskType.causal, "described": described})
