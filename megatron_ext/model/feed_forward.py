"""megatron-core's MLP with a shorter way through it where nothing is trained."""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from megatron_ext.device.kernels import nothing_is_trained
from megatron_ext.device.triton import choice


class FeedForward(MLP):
    """Computes activation(x A^T) B^T, or with a gate (activation(x G^T) * x A^T) B^T (Shazeer 2020, arXiv:2002.05202).

    On a GPU one kernel computes the activation with its gate. In inference mode it multiplies in place, and leaves out
    the offset of the gate that no model here has: for a single token each operation less counts.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias that must still be added, if any. hidden_states: [S, B, hidden]."""
        first: Any = self.linear_fc1
        second: Any = self.linear_fc2
        if self.config.bias_activation_fusion and per_token_scale is None and choice.take(hidden_states):
            from megatron_ext.device.triton.swiglu import swiglu

            return second(swiglu(first(hidden_states)[0]))
        trained = not nothing_is_trained() or self.config.bias_activation_fusion
        if trained or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **settings)
        activation: Any = self.config.activation_func
        expanded, _ = first(hidden_states)  # with its bias, as `ColumnLinear` adds it
        if not self.config.gated_linear_unit:
            return second(activation(expanded))
        gate, up = expanded.chunk(2, dim=-1)
        return second(activation(gate).mul_(up))
