"""megatron-core's MLP with a shorter way through it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_ext.device.kernels import nothing_is_trained, swiglu
from megatron_ext.device.triton import kernel_choice
from megatron_ext.parts.mlp.describe import XIELU_BEGINNINGS, XIELU_BETA
from megatron_ext.parts.norm.compute import uninitialized


class OfMultiplied(NamedTuple):
    """Multiplies the input by a factor before the activation: activation(factor x gate)."""

    activation: Callable[[torch.Tensor], torch.Tensor]
    factor: float

    def __call__(self, gate: torch.Tensor) -> torch.Tensor:
        """Return activation(factor x gate)."""
        return self.activation(self.factor * gate)


class FeedForward(MLP):
    """Computes activation(x A^T) B^T, or with a gate (activation(x G^T) * x A^T) B^T (Shazeer 2020, arXiv:2002.05202).

    On a GPU one kernel computes the activation with its gate. In inference mode it multiplies in place: for a single
    token each operation less counts.
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
        return second(self._activated(first(hidden_states)[0]))  # with its bias, as `ColumnLinear` adds it

    def _activated(self, expanded: torch.Tensor) -> torch.Tensor:
        return (
            self.config.activation_func(expanded) if not self.config.gated_linear_unit else glu(expanded, self.config)
        )


class _Numbers(torch.nn.Module):
    """Parameters that all tensor-parallel ranks have, and of which a checkpoint holds one."""

    def __init__(self, tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the parameters in the form of megatron-core's checkpoints."""
        own, groups = (
            self.state_dict(keep_vars=True),
            {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]},
        )
        return make_sharded_tensors_for_checkpoint(own, prefix, {}, sharded_offsets, **groups)

    def forward(self) -> torch.Tensor:
        """Return all parameters of the module as one tensor, [N]: a scheme that shards weights has gathered a module's
        parameters when its forward pass runs."""
        return torch.cat(list(self.parameters()))


class XieluFeedForward(FeedForward):
    """An MLP whose activation has two numbers that each layer learns."""

    def __init__(self, config: TransformerConfig, *positional: Any, **settings: Any) -> None:
        super().__init__(config, *positional, **settings)
        self.xielu = _Numbers(self.tp_group)
        for name in XIELU_BEGINNINGS:
            self.xielu.register_parameter(name, uninitialized(config, 1))
            # Each tensor-parallel rank sees all tokens, and its own channels.
            getattr(self.xielu, name).sequence_parallel = False

    def _activated(self, expanded: torch.Tensor) -> torch.Tensor:
        alphas_2 = copy_to_tensor_model_parallel_region(self.xielu(), group=self.tp_group)
        return computed_again(xielu, expanded, alphas_2)


def xielu(x: torch.Tensor, alphas_2: torch.Tensor) -> torch.Tensor:
    """Return xIELU (arXiv:2411.13010): a x^2 + b x for x > 0 and a' (exp(x) - 1 - x) + b x below, with b 1/2, a the
    softplus of one number and a' b + the softplus of the other. Like its authors, it takes exp(x) - 1 at -1e-6 at
    most."""
    positive, negative = F.softplus(alphas_2)
    below = (torch.expm1(x.clamp(max=-1e-6)) - x) * (XIELU_BETA + negative)
    return torch.where(x > 0, positive * x * x, below) + XIELU_BETA * x


def glu(expanded: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return activation(gate) * (up + offset), of megatron-core's settings, [..., width]; expanded: gate, then up."""
    activation: Any = config.activation_func
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if clamp is not None or offset != 0.0 or activation is quick_gelu or isinstance(activation, OfMultiplied):
        return computed_again(partial(_bounded_glu, activation, clamp, offset), expanded)
    gate, up = expanded.chunk(2, dim=-1)
    if nothing_is_trained():
        return activation(gate).mul_(up)
    return swiglu(expanded) if activation is F.silu else activation(gate) * up


def _bounded_glu(activation: Any, clamp: float | None, offset: float, expanded: torch.Tensor) -> torch.Tensor:
    gate, up = expanded.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation(gate) * (up + offset)


def computed_again(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Return function(*inputs), keeping the inputs alone: activations in between are computed again for the
    gradients."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*inputs)
    return _ComputedAgain.apply(function, *inputs)  # pyright: ignore[reportReturnType]


class _ComputedAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, grad)
