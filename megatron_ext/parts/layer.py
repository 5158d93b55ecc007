"""The transformer layer: x + after(part(before(x))), for the mixer and then for the MLP, or for both at once."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.device.kernels import nothing_is_trained
from megatron_ext.device.triton import kernel_choice
from megatron_ext.parts.attention.cached import Sequences
from megatron_ext.parts.linear.compute import leave_sums, summed
from megatron_ext.parts.norm.compute import LayerNorm, NormBuilder, RMSNorm

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""Result of a part: its output, and a bias that is still to be added."""


_PARTS = ("self_attention", "mlp")


class ResidualLayer(TransformerLayer):
    """Computes x + after(attention(before(x))), then x + after(MLP(before(x))), with dropout on both branches; or in
    parallel x + (attention(before(x)) + MLP(before'(x))) (PaLM, arXiv:2204.02311, section 2), with dropout on the sum,
    which tensor-parallel ranks add up in one exchange, unless the MLP is a mixture of experts.

    Norms stand before (Xiong et al. 2020, figure 1b), after (OLMo 2, arXiv:2501.00656) or on both sides. The layer is
    built, named and divided as megatron-core's is; a forward pass without that one's branches for offloading and
    cross-attention saves what is mostly Python on a CPU: 7% of a step of one small sequence. A layer of one thing alone
    has IdentityOp in the place of the other.

    On a GPU one kernel adds what a part gives to the residual stream, and normalizes the sum for the next part. For the
    part of the next layer that is so where `read_ahead` has named the layer.

    Args:
        norm_after: builds the norms after attention and MLP; None where there are none.
        normed_after: names of the modules that have such a norm after them, `self_attention` and `mlp`.
        is_parallel: whether attention and MLP read the same residual stream; through one norm, where only attention
            has one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *positional: Any,
        norm_after: NormBuilder | None = None,
        normed_after: tuple[str, ...] = (),
        is_parallel: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(config, *positional, **settings)
        self._next: tuple[ResidualLayer, ...] = ()  # in a tuple, it is no part of this layer
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None
        self.is_parallel = is_parallel
        parts: Any = self
        # Experts have exchanged and summed their outputs themselves.
        self.sums_at_once = is_parallel and hasattr(parts.mlp, "linear_fc2")
        if self.sums_at_once:
            leave_sums(parts.self_attention.linear_proj, parts.mlp.linear_fc2)
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if norm_after is not None:
            sizes = config, config.hidden_size, config.layernorm_epsilon
            has = (name in normed_after and not isinstance(getattr(parts, name), IdentityOp) for name in _PARTS)
            norms = (norm_after(*sizes) if is_there else None for is_there in has)
            self.post_self_attn_layernorm, self.post_mlp_layernorm = norms

    def read_ahead(self, following: "ResidualLayer") -> None:
        """Have this layer normalize its output for the next one, where one kernel makes both. The next layer must be
        given the same tensor, and its norm's weight must be gathered while this layer computes."""
        self._next = (following,)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Sequences | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the layer's output, [sequence, batch, hidden], as hidden_states, and no context for cross-attention.

        In inference the last layer goes on after its attention with the positions that are read alone.
        """
        given = [name for name, value in unused.items() if value is not None]
        assert not given, f"not for plain sequences: {given}"
        if isinstance(self.self_attention, IdentityOp):
            if packed_seq_params is not None:
                hidden_states = packed_seq_params.narrowed(hidden_states, self)
            return self._with_mlp(hidden_states), None
        read, self._read = self._read, None
        if read is not None and read[0] is hidden_states:
            normed, forget = read[1], _nothing
        else:
            normed, forget = self._normed(self.input_layernorm, hidden_states, self.recompute_input_layernorm)
        attended: Any = self.self_attention(normed, attention_mask, rotary_pos_emb, packed_seq_params)
        if packed_seq_params is not None:
            hidden_states = packed_seq_params.narrowed(hidden_states, self)
            normed = packed_seq_params.narrowed(normed, self) if self.is_parallel else normed
        if self.is_parallel:
            return self._added(self._both(attended, normed, hidden_states, forget), hidden_states, None), None
        forget(attended[0])
        if isinstance(self.mlp, IdentityOp):
            return self._added(attended, hidden_states, self.post_self_attn_layernorm), None
        norm_after: Any = self.post_self_attn_layernorm
        before_mlp: Any = self.pre_mlp_layernorm
        if self._adds_and_norms_at_once(attended, norm_after, before_mlp, self.recompute_pre_mlp_layernorm):
            # As a module, whose hook waits for its weight (--overlap-param-gather).
            normed, hidden_states = before_mlp(attended[0], hidden_states)
            return self._put_out(self._expanded(normed), hidden_states), None
        return self._with_mlp(self._added(attended, hidden_states, self.post_self_attn_layernorm)), None

    def _with_mlp(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum of the residual stream and of the MLP's output for it."""
        normed, forget = self._normed(self.pre_mlp_layernorm, hidden_states, self.recompute_pre_mlp_layernorm)
        expanded = self._expanded(normed)
        forget(expanded[0])
        return self._put_out(expanded, hidden_states)

    def _put_out(self, expanded: Branch, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the residual stream with the MLP's output added; the next layer's norm may have read it by then."""
        for following in self._next:
            norm: Any = following.input_layernorm
            recomputes = following.recompute_input_layernorm
            if self._adds_and_norms_at_once(expanded, self.post_mlp_layernorm, norm, recomputes):
                normed, output = norm(expanded[0], hidden_states)
                following._read = output, normed
                return output
        return self._added(expanded, hidden_states, self.post_mlp_layernorm)

    def _both(
        self, attended: Branch, normed: torch.Tensor, hidden_states: torch.Tensor, forget: Callable[..., object]
    ) -> Branch:
        """Return the sum of the outputs of attention and MLP.

        Args:
            attended: this rank's part of attention's output.
            normed: attention's input.
            hidden_states: the residual stream.
            forget: function to call with the sum when nobody reads `normed` any more.
        """
        forget_own = _nothing
        if not isinstance(self.pre_mlp_layernorm, IdentityOp):
            normed, forget_own = self._normed(self.pre_mlp_layernorm, hidden_states, self.recompute_pre_mlp_layernorm)
        expanded = self._expanded(normed)
        output: Any = attended[0] + expanded[0]
        forget(output)
        forget_own(output)
        attention: Any = self.self_attention
        biases = [bias for _, bias in (attended, expanded) if bias is not None]
        output = summed(output, attention.linear_proj) if self.sums_at_once else output
        return output, sum(biases[1:], biases[0]) if biases else None

    def _expanded(self, normed: torch.Tensor) -> Branch:
        mlp: Any = self._checkpointed_mlp if self.recompute_mlp and self.training else self.mlp
        return mlp(normed)

    def _added(self, branch: Branch, hidden_states: torch.Tensor, norm_after: Any) -> torch.Tensor:
        """Return hidden_states + after(branch)."""
        if norm_after is not None:
            output, bias = branch
            branch = norm_after(output if bias is None else output + bias), None
        # Fused operations are compiled, in inference anew for every length.
        fused = self.config.bias_dropout_fusion and not nothing_is_trained()
        add: Any = get_bias_dropout_add(self.training, fused)
        return add(branch, hidden_states, self.hidden_dropout)

    def _adds_and_norms_at_once(self, branch: Branch, norm_after: Any, norm: Any, recomputes_norm: bool) -> bool:
        """Return whether one kernel of a GPU adds a part's output to the residual stream and normalizes the sum.

        Args:
            norm_after: norm between the part and the sum.
            norm: norm that reads the sum.
            recomputes_norm: whether its result is computed anew in the backward pass.
        """
        output, bias = branch
        return (
            self.config.bias_dropout_fusion
            and bias is None
            and norm_after is None
            and (self.hidden_dropout == 0.0 or not self.training)
            and not recomputes_norm
            and isinstance(norm, RMSNorm | LayerNorm)
            and kernel_choice.take_rows(output)
        )

    def _checkpointed_mlp(self, normed: torch.Tensor) -> Branch:
        """Compute the MLP anew in the backward pass (--recompute-modules mlp).

        The bias that is still to be added goes around the checkpoint: a parameter that an autograd function returns
        becomes that function's output for good, and the backward pass through it never ends.
        """
        biases: list[torch.Tensor | None] = []

        def product(states: torch.Tensor) -> torch.Tensor:
            mlp: Any = self.mlp
            output, bias = mlp(states)
            biases.append(bias)
            return output

        return tensor_parallel.checkpoint(product, False, normed), biases[0]

    def _normed(
        self, norm: Any, hidden_states: torch.Tensor, recompute: bool
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], object]]:
        """Return the normalized states, and a function to call with the output that was computed from them.

        With --recompute-modules layernorm the function frees the states, and recomputes them when the output's gradient
        arrives.
        """
        if isinstance(norm, IdentityOp):
            return hidden_states, _nothing
        if not (recompute and torch.is_grad_enabled()):
            return norm(hidden_states), _nothing
        # Its default, False, asks Transformer Engine about FP8 all the same; None does not.
        kept = tensor_parallel.CheckpointWithoutOutput(fp8=None)  # pyright: ignore[reportArgumentType]
        return kept.checkpoint(norm, hidden_states), kept.discard_output_and_register_recompute


def read_ahead(layers: Iterable[torch.nn.Module]) -> None:
    """Have each layer normalize its output for the next one, where the next one begins with attention as this class has
    it."""
    for layer, following in itertools.pairwise(layers):
        if not isinstance(layer, ResidualLayer) or not isinstance(following, ResidualLayer):
            continue
        if not isinstance(following.self_attention, IdentityOp):
            layer.read_ahead(following)


def _nothing(_output: torch.Tensor) -> None:
    """Free nothing: the normalized states are kept."""
