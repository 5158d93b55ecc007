"""megatron-core's MLP with a shorter way through it."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP

from megatron_ext.device.kernels import nothing_is_trained, swiglu
from megatron_ext.device.triton import kernel_choice


class FeedForward(MLP):
    """Computes activation(x A^T) B^T, or with a gate (activation(x G^T) * x A^T) B^T (Shazeer 2020, arXiv:2002.05202).

    On a GPU one kernel computes the activation with its gate. It leaves out the offset of the gate that no model here
    has. In inference mode it multiplies in place: for a single token each operation less counts.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias that must still be added, if any. hidden_states: [S, B, hidden]."""
        first: Any = self.linear_fc1
        second: Any = self.linear_fc2
        fuses = self.config.bias_activation_fusion
        if fuses and per_token_scale is None and kernel_choice.take(hidden_states):
            from megatron_ext.device.triton import swiglu as kernel

            return second(kernel.swiglu(first(hidden_states)[0]))
        if fuses or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **settings)
        activation: Any = self.config.activation_func
        expanded, _ = first(hidden_states)  # with its bias, as `ColumnLinear` adds it
        if not self.config.gated_linear_unit:
            return second(activation(expanded))
        gate, up = expanded.chunk(2, dim=-1)
        if nothing_is_trained():
            return second(activation(gate).mul_(up))
        return second(swiglu(expanded) if activation is F.silu else activation(gate) * up)
