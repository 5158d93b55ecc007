"""Computes the hidden states of a depth of multi-token prediction."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.parts.attention.cached import Sequences
from megatron_ext.parts.linear.compute import ColumnLinear
from megatron_ext.parts.norm.compute import norm_builder
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.numbers import record
from megatron_ext.plugins.next_token.describe import loss_of_depth


class DepthLayers(MegatronModule):
    """The layers of a depth that has letters, one after another.

    Args:
        config: of the model.
        layer_number: number of the depth, from 1.
        specs: of the layers.
        of_layers: settings of each of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        specs: Sequence[ModuleSpec],
        submodules: HybridStackSubmodules | None = None,
        name: str | None = None,
        **of_layers: Any,
    ) -> None:
        super().__init__(config)
        # megatron-core's table of losses of experts has one row for each depth.
        settings = {"config": config, "layer_number": layer_number, **of_layers}
        layers: list[Any] = [build_module(spec, **settings) for spec in specs]
        self.layers = torch.nn.ModuleList(layers)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Sequences | None = None,
        **unused: object,
    ) -> torch.Tensor:
        """Return the hidden states after the last layer, [S, B, H], from those before the first one."""
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params)
        return hidden_states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the layers' weights as megatron-core's checkpoints take them, each layer under its own name."""
        found: dict[str, Any] = {}
        for place, layer in enumerate(self.layers):
            of_layer: Any = layer
            found |= of_layer.sharded_state_dict(f"{prefix}layers.{place}.", sharded_offsets, metadata)
        return found


class NextTokenLayer(MultiTokenPredictionLayer):
    """megatron-core's depth, which is given the embeddings of the tokens ahead.

    Its own pass shifts the tokens that a context-parallel rank holds, and over the end of a document. Ours were shifted
    when the whole sample was at hand (`data/microbatch.py`).
    """

    def __init__(self, *positional: Any, **settings: Any) -> None:
        super().__init__(*positional, **settings)
        if isinstance(self.mtp_model_layer, DepthLayers):
            self.mtp_layer_pattern = ""  # megatron-core then calls and saves them as the layers of its own hybrid

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

    def report(self, depth: int, losses: torch.Tensor, weights_BS: torch.Tensor) -> None:
        """Record the loss of a depth in a microbatch.

        Args:
            depth: its index, from 0; one module may compute several.
            losses: nats, of every token [B, S], or already the weighted sum.
            weights_BS: weights of the tokens; with them the sum over the number of tokens that count in the main loss
                is the mean over the depth's tokens (`train/step.py`).
        """
        assert self.tp_group is not None, "which ranks have the same losses?"
        if self.tp_group.rank() == 0:
            total = torch.dot(losses.reshape(-1).float(), weights_BS.reshape(-1).float()) if losses.dim() else losses
            record(loss_of_depth(depth), total)


def next_token_spec(norm: Norm, layers: Sequence[ModuleSpec], has_letters: bool) -> ModuleSpec:
    """Return the spec of a depth of multi-token prediction: norms, a projection and the given transformer layers.

    Args:
        norm: kind of each norm.
        layers: specs of the layers.
        has_letters: whether they are the layers of letters; otherwise there is one.
    """
    build = norm_builder(norm)
    of_engine = HybridStackSubmodules()  # megatron-core looks at it, and finds nothing that it does not know
    layer = ModuleSpec(DepthLayers, {"specs": layers}, of_engine) if has_letters else layers[0]
    parts = MultiTokenPredictionLayerSubmodules(build, build, build, ColumnLinear, layer)
    return ModuleSpec(NextTokenLayer, submodules=parts)
