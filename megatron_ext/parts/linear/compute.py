"""megatron-core's parallel linear layers are one plain product where a rank has nothing to communicate.

That is the case on one tensor-parallel rank, and for the matrix product of a row-parallel layer on any number: torch
then adds the bias inside the product, and no autograd function in Python is needed. (On a CPU that makes a small
model's step 7% shorter.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_pg_size
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import Config
from megatron_ext.device import split_backward
from megatron_ext.device.kernels import linear
from megatron_ext.device.weight_gradients import add_product_
from megatron_ext.parts.linear import overlapped
from megatron_ext.parts.norm.compute import uninitialized

TrainedProduct = Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor]
"""A product in the place of a layer's own while it is trained: from the layer's input and weight, gathered and summed
over the tensor-parallel ranks as the layer does it, but not over inputs that these ranks divide."""


class ColumnLinear(ColumnParallelLinear):
    """Computes Y = X A^T + b with the rows of A, and b, divided over the tensor-parallel ranks."""

    trained_product: TrainedProduct | None = None
    """Product of the layer in training; None where it multiplies as elsewhere."""
    keeps_gathered = False
    """Whether it keeps the input that it has gathered (--sequence-parallel-keep-gathered)."""
    overlaps = False
    """Whether it multiplies while it communicates (--tp-comm-overlap)."""

    def __init__(self, *sizes: int, skip_bias_add: bool, **settings: Any) -> None:
        # The bias lies with its rows, so that nothing is gained by handing it to the next operation.
        super().__init__(*sizes, skip_bias_add=False, **settings)
        # The engine's own product adds its weight gradient to the main gradient (--gradient-accumulation-fusion).
        self.plain = get_pg_size(self.tp_group) == 1 and not self.gradient_accumulation_fusion

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's part of Y, and no bias to add later. input_: [..., columns of A]."""
        if self.trained_product is not None and self.training:
            assert weight is None, "this layer multiplies with its own weight"
            assert not self.gather_output, "outputs stay divided"
            assert not runtime_gather_output, "outputs stay divided"
            assert self.weight is not None, "this layer has a weight"
            output = self.trained_product(input_, self.weight)
            return output if self.bias is None else output + self.bias, None
        if not self.plain or self.weight is None or weight is not None:
            return super().forward(input_, weight, runtime_gather_output)
        return linear(input_, self.weight, self.bias), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **settings: Any) -> torch.Tensor:
        if split_backward.splits(weight):
            return split_product(input, weight, settings)
        if self.keeps_gathered and settings["sequence_parallel"] and weight.requires_grad:
            return _GatheredLinear.apply(input, weight, settings["bias"], self.tp_group)  # pyright: ignore
        if self.overlaps and settings["sequence_parallel"]:
            adds = overlapped.adds_to(weight, self.gradient_accumulation_fusion)
            return overlapped.column_parallel(input, weight, settings["bias"], settings["tp_group"], adds)
        return super()._forward_impl(input, weight, **settings)


def split_product(input: torch.Tensor, weight: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Return the product that megatron-core's `_forward_impl` is asked for, with its backward pass split."""
    group, adds = settings["tp_group"], None
    if settings["gradient_accumulation_fusion"]:
        main_grad: Any = vars(weight)["main_grad"]
        adds = partial(add_product_, main_grad)
    gathers, sums = (group if settings[each] else None for each in ("sequence_parallel", "allreduce_dgrad"))
    return split_backward.linear(input, weight, settings["bias"], gathers=gathers, sums=sums, adds=adds)


class _GatheredLinear(torch.autograd.Function):
    """Gathers X, of which each tensor-parallel rank has a slice of the sequence, and keeps it for the gradient of A.

    megatron-core's keeps the slice and gathers it again in the backward pass, which a GPU may do next to a product; a
    CPU has no time for it. The products are the same, and so are their bits.
    """

    @staticmethod
    def forward(
        ctx: Any, slice_SBH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: ProcessGroup
    ) -> torch.Tensor:
        sequence, *rest = slice_SBH.shape
        x_SBH = slice_SBH.new_empty(sequence * group.size(), *rest)
        torch.distributed.all_gather_into_tensor(x_SBH, slice_SBH, group=group)
        ctx.save_for_backward(x_SBH, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        output = torch.matmul(x_SBH, weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_SBV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        x_SBH, weight = ctx.saved_tensors
        for_x = torch.matmul(grad_SBV, weight)
        for_slice = x_SBH.new_empty(x_SBH.size(0) // ctx.group.size(), *x_SBH.shape[1:])
        summed: Any = torch.distributed.reduce_scatter_tensor(for_slice, for_x, group=ctx.group, async_op=True)
        rows_NV = grad_SBV.reshape(-1, grad_SBV.size(-1))
        for_weight = rows_NV.t().matmul(x_SBH.view(-1, x_SBH.size(-1)))
        for_bias = rows_NV.sum(dim=0) if ctx.has_bias else None
        summed.wait()
        return for_slice, for_weight, for_bias, None


class RowLinear(RowParallelLinear):
    """Computes Y = X A^T + b with the columns of A divided over the tensor-parallel ranks."""

    trained_product: TrainedProduct | None = None
    """Product of the layer in training; None where it multiplies as elsewhere."""
    overlaps = False
    """Whether it multiplies while it communicates (--tp-comm-overlap)."""

    def __init__(self, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.plain = get_pg_size(self.tp_group) == 1 and not self.gradient_accumulation_fusion

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return Y, and the bias if it must be added once, after the sum. input_: [..., this rank's columns of A]."""
        if self.overlaps and self.sequence_parallel and not self.explicit_expert_comm:
            adds = overlapped.adds_to(self.weight, self.gradient_accumulation_fusion)
            group: Any = self.tp_group
            output = overlapped.row_parallel(input_, self.weight, group, adds)
            if self.skip_bias_add:
                return output, self.bias
            return output if self.bias is None else output + self.bias, None
        if not self.plain or (self.trained_product is not None and self.training):
            return super().forward(input_)
        return linear(input_, self.weight, self.bias), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **settings: Any) -> torch.Tensor:
        if self.trained_product is not None and self.training:
            return self.trained_product(input, self.weight)
        if split_backward.splits(weight):
            return split_product(input, weight, settings)
        if self.gradient_accumulation_fusion:
            return super()._forward_impl(input, weight, **settings)
        return linear(input, weight)


def leave_sums(*linears: Any) -> None:
    """Have these row-parallel layers give this rank's part of Y, which `summed` adds up for all of them at once."""
    for one in linears:
        one.explicit_expert_comm = True  # by which the engine's shared experts leave the sum to others, too


def summed(parts: torch.Tensor, linear: Any) -> torch.Tensor:
    """Return the sum over the ranks of a layer of `leave_sums`; under sequence parallelism, for this rank's tokens."""
    if linear.tp_group.size() == 1:
        return parts
    divided, whole = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
    return (divided if linear.sequence_parallel else whole)(parts, group=linear.tp_group)


class BiasedColumnLinear(ColumnLinear):
    """The same linear layer with a bias, whatever megatron-core's configuration says of all linear layers."""

    def __init__(self, *sizes: int, bias: bool, **settings: Any) -> None:
        super().__init__(*sizes, bias=True, **settings)


class BiasedRowLinear(RowLinear):
    """The same linear layer with a bias, whatever megatron-core's configuration says of all linear layers."""

    def __init__(self, *sizes: int, bias: bool, **settings: Any) -> None:
        super().__init__(*sizes, bias=True, **settings)


def keep_gathered(chunk: torch.nn.Module, config: Config) -> None:
    """Have the column-parallel layers of a model chunk keep the inputs that they gather, where the flags ask for it."""
    for module in chunk.modules():
        if isinstance(module, ColumnLinear):
            module.keeps_gathered = config.layout.sequence_parallel_keep_gathered


def overlap_communication(chunk: torch.nn.Module) -> None:
    """Have the column- and row-parallel layers of a model chunk multiply while they communicate, but for experts, whose
    tokens travel otherwise."""
    of_experts = {one for moe in chunk.modules() if isinstance(moe, MoELayer) for one in moe.modules()}
    for module in chunk.modules():
        if isinstance(module, ColumnLinear | RowLinear) and module not in of_experts:
            module.overlaps = True


class WholeLinear(torch.nn.Module):
    """Computes Y = X A^T with all of A on every rank: under sequence parallelism of this rank's tokens."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = uninitialized(config, outputs, inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return Y, [..., outputs]. x: [..., inputs]."""
        return linear(x, self.weight, None)
