"""Computes the hidden states of a depth of multi-token prediction."""

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ext.parts.attention.cached import Sequences
from megatron_ext.parts.linear.compute import ColumnLinear
from megatron_ext.parts.norm.compute import norm_builder
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.numbers import record
from megatron_ext.plugins.next_token.describe import loss_of_depth


class NextTokenLayer(MultiTokenPredictionLayer):
    """megatron-core's depth, which is given the embeddings of the tokens ahead.

    Its own pass shifts the tokens that a context-parallel rank holds, and over the end of a document. Ours were shifted
    when the whole sample was at hand (`data/microbatch.py`).
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_SBH: torch.Tensor,
        embedded_SBH: torch.Tensor,
        rotary: torch.Tensor | None,
        sequences: Sequences | None,
    ) -> torch.Tensor:
        """Return the depth's normalized hidden states, [S, B, H], from the hidden states of the depth before."""

        def states(hidden_SBH: torch.Tensor, embedded_SBH: torch.Tensor) -> torch.Tensor:
            return self._proj_and_transformer_layer(
                hidden_states=hidden_SBH,
                decoder_input=embedded_SBH,
                rotary_pos_emb=rotary,
                packed_seq_params=sequences,  # pyright: ignore[reportArgumentType]
            )

        if self.config.recompute_method == "uniform" and self.training:
            return tensor_parallel.checkpoint(states, False, hidden_SBH, embedded_SBH)
        return states(hidden_SBH, embedded_SBH)

    def report(self, losses: torch.Tensor, weights_BS: torch.Tensor) -> None:
        """Record the depth's loss in a microbatch.

        Args:
            losses: nats, of every token [B, S], or already the weighted sum.
            weights_BS: weights of the tokens; with them the sum over the number of tokens that count in the main loss
                is the mean over the depth's tokens (`train/step.py`).
        """
        assert self.tp_group is not None, "which ranks have the same losses?"
        if self.tp_group.rank() == 0:
            total = torch.dot(losses.reshape(-1).float(), weights_BS.reshape(-1).float()) if losses.dim() else losses
            record(loss_of_depth(self.layer_number - 1), total)


def next_token_spec(norm: Norm, layer: ModuleSpec) -> ModuleSpec:
    """Return the spec of a depth of multi-token prediction: norms, a projection and the given transformer layer."""
    build = norm_builder(norm)
    parts = MultiTokenPredictionLayerSubmodules(build, build, build, ColumnLinear, layer)
    return ModuleSpec(NextTokenLayer, submodules=parts)
