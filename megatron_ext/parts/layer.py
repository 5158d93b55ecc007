"""Transformer layers whose forward pass is for training alone."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.data.packing import Documents
from megatron_ext.device.triton import kernel_choice
from megatron_ext.parts.attention.cached import WholeSequences
from megatron_ext.parts.norm.compute import LayerNorm, RMSNorm, norm_class


class PreNormLayer(TransformerLayer):
    """Computes x + attention(norm(x)), then x + MLP(norm(x)) (Xiong et al. 2020, figure 1b), with dropout on both
    branches.

    It is built, named and divided as megatron-core's layer is. A forward pass without the branches for inference,
    offloading and cross-attention saves what is mostly Python on a CPU: 7% of a step of one small sequence.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Documents | WholeSequences | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the layer's output, [sequence, batch, hidden], as hidden_states, and no context for
        cross-attention."""
        given = [name for name, value in unused.items() if value is not None]
        assert not given, f"not for training on plain sequences: {given}"
        if isinstance(packed_seq_params, WholeSequences):
            return self._inferred(hidden_states, rotary_pos_emb, packed_seq_params), None
        add: Any = get_bias_dropout_add(self.training, self.config.bias_dropout_fusion)
        normed, forget = self._norm(self.input_layernorm, hidden_states, self.recompute_input_layernorm)
        attended: Any = self.self_attention(normed, attention_mask, rotary_pos_emb, packed_seq_params)
        forget(attended[0])
        if self._adds_and_norms_at_once(attended):
            before_mlp: Any = self.pre_mlp_layernorm
            normed, hidden_states = before_mlp.of_sum(attended[0], hidden_states)
            forget = _nothing
        else:
            hidden_states = add(attended, hidden_states, self.hidden_dropout)
            normed, forget = self._norm(self.pre_mlp_layernorm, hidden_states, self.recompute_pre_mlp_layernorm)
        expanded = self._checkpointed_mlp(normed) if self.recompute_mlp and self.training else self._mlp(normed)
        forget(expanded[0])
        hidden_states = add(expanded, hidden_states, self.hidden_dropout)
        return hidden_states, None

    def _adds_and_norms_at_once(self, attended: tuple[torch.Tensor, torch.Tensor | None]) -> bool:
        """Return whether one kernel of a GPU adds attention's output to the residual stream and normalizes the sum."""
        output, bias = attended
        return (
            self.config.bias_dropout_fusion
            and bias is None
            and (self.hidden_dropout == 0.0 or not self.training)
            and not self.recompute_pre_mlp_layernorm
            and isinstance(self.pre_mlp_layernorm, RMSNorm | LayerNorm)
            and kernel_choice.take_rows(output)
        )

    def _inferred(self, hidden_states: torch.Tensor, rotary_pos_emb: Any, inference: WholeSequences) -> torch.Tensor:
        """Return the output without dropout: of the last layer, that of the positions that are read alone."""
        before_attention: Any = self.input_layernorm
        before_mlp: Any = self.pre_mlp_layernorm
        attended: Any = self.self_attention(before_attention(hidden_states), None, rotary_pos_emb, inference)
        hidden_states = inference.narrowed(hidden_states, self) + _with_bias(*attended)
        return hidden_states + _with_bias(*self._mlp(before_mlp(hidden_states)))

    def _mlp(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        mlp: Any = self.mlp
        return mlp(normed)

    def _checkpointed_mlp(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the MLP anew in the backward pass (--recompute-modules mlp).

        The bias that is still to be added goes around the checkpoint: a parameter that an autograd function returns
        becomes that function's output for good, and the backward pass through it never ends.
        """
        biases: list[torch.Tensor | None] = []

        def product(states: torch.Tensor) -> torch.Tensor:
            output, bias = self._mlp(states)
            biases.append(bias)
            return output

        return tensor_parallel.checkpoint(product, False, normed), biases[0]

    def _norm(
        self, norm: Any, hidden_states: torch.Tensor, recompute: bool
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], object]]:
        """Return the normalized states, and what to call with the output that was computed from them.

        With --recompute-modules layernorm that frees them, and computes them anew when the output's gradient is there.
        """
        if not (recompute and torch.is_grad_enabled()):
            return norm(hidden_states), _nothing
        # Its default, False, asks Transformer Engine about FP8 all the same; None does not.
        kept = tensor_parallel.CheckpointWithoutOutput(fp8=None)  # pyright: ignore[reportArgumentType]
        return kept.checkpoint(norm, hidden_states), kept.discard_output_and_register_recompute


class PostNormLayer(PreNormLayer):
    """x + norm(attention(x)), then x + norm(MLP(x)) (OLMo 2, arXiv:2501.00656), with dropout on both branches."""

    def __init__(self, config: TransformerConfig, *positional: Any, **settings: Any) -> None:
        super().__init__(config, *positional, **settings)
        norm, size = norm_class(config.normalization), config.hidden_size
        self.post_self_attn_layernorm = norm(config, size, config.layernorm_epsilon)
        self.post_mlp_layernorm = norm(config, size, config.layernorm_epsilon)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Documents | WholeSequences | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [sequence, batch, hidden]. Returns the same shape, and no context for cross-attention."""
        given = [name for name, value in unused.items() if value is not None]
        assert not given, f"not for training on plain sequences: {given}"
        if isinstance(packed_seq_params, WholeSequences):
            return self._inferred(hidden_states, rotary_pos_emb, packed_seq_params), None
        add: Any = get_bias_dropout_add(self.training, self.config.bias_dropout_fusion)
        attended: Any = self.self_attention(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params)
        normed = self.post_self_attn_layernorm(_with_bias(*attended))
        hidden_states = add((normed, None), hidden_states, self.hidden_dropout)

        again = self.recompute_mlp and self.training
        expanded = self._checkpointed_mlp(hidden_states) if again else self._mlp(hidden_states)
        normed = self.post_mlp_layernorm(_with_bias(*expanded))
        return add((normed, None), hidden_states, self.hidden_dropout), None

    def _inferred(self, hidden_states: torch.Tensor, rotary_pos_emb: Any, inference: WholeSequences) -> torch.Tensor:
        attended: Any = self.self_attention(hidden_states, None, rotary_pos_emb, inference)
        normed = self.post_self_attn_layernorm(_with_bias(*attended))
        hidden_states = inference.narrowed(hidden_states, self) + normed
        return hidden_states + self.post_mlp_layernorm(_with_bias(*self._mlp(hidden_states)))


def _nothing(_output: torch.Tensor) -> None:
    """Free nothing: what would be freed is kept."""


def _with_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return output if bias is None else output + bias


_CLASSES: dict[str, type[TransformerLayer]] = {"before": PreNormLayer, "after": PostNormLayer}


def layer_class(norm_places: str) -> type[TransformerLayer]:
    """Return the class of a layer by where its norms stand (`parts.stack.Layer.norm_places`)."""
    assert norm_places in _CLASSES, f"nothing builds norms {norm_places} attention and MLP"
    return _CLASSES[norm_places]
