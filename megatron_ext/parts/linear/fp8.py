"""Computes the linear layers of attention and MLP in FP8 (--fp8-format).

Of Y = X W^T, all three products are in FP8: Y itself, dX = dY W, and dW = dY^T X. X and W are rounded to E4M3, dY to
E5M2 (hybrid) or to E4M3 as well (e4m3). Weights stay in their precision: they are rounded at each use, from the value
that the forward pass has without FP8, and the optimizer's masters, checkpoints and exports know nothing of it.

What is rounded with which scale does not depend on the layout: a scale for more of a matrix than a rank holds is found
together with the tensor-parallel ranks (where outputs or inputs of the layer are divided) and the context-parallel
ranks (tokens). Data-parallel ranks and microbatches have matrices of their own.

Outside of training (evaluation, tasks, generation) these layers multiply as without FP8.

Shapes: T tokens (sequence * batch), K inputs, N outputs, each of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import Config
from megatron_ext.device.weight_gradients import add_, replaces_gradient
from megatron_ext.parts.linear.scaled_products import E4M3, E5M2, RECIPES, Block, Quantized, Recipe, product, quantize


@dataclass(frozen=True)
class Fp8:
    """FP8 settings of one linear layer."""

    recipe: Recipe
    gradients: torch.dtype
    """Format of dY."""
    tokens_over: Sequence[ProcessGroup] = ()
    """The ranks that tokens are divided over in the product; none where this rank has all of a microbatch."""
    inputs_over: Sequence[ProcessGroup] = ()
    outputs_over: Sequence[ProcessGroup] = ()
    gathers_over: ProcessGroup | None = None
    """The ranks whose tokens are gathered first (sequence parallelism)."""
    sums_over: ProcessGroup | None = None
    """The ranks that each have a part of dX, which is otherwise whole, or is scattered over `gathers_over`."""
    adds_to_main_gradient: bool = False


def products_of(config: Config, groups: ProcessGroupCollection, *, divides: str) -> Fp8:
    """Return the FP8 settings of the layers whose outputs (column-parallel) or inputs (row-parallel) are divided.

    Args:
        config: the resolved configuration, with --fp8-format.
        groups: this rank's process groups.
        divides: "outputs" or "inputs".
    """
    training = config.training
    tensor = [groups.tp] if groups.tp.size() > 1 else []
    by_outputs = divides == "outputs"
    gathers = bool(tensor) and by_outputs and config.layout.sequence_parallel
    return Fp8(
        recipe=RECIPES[training.fp8_recipe],
        gradients=E5M2 if training.fp8_format == "hybrid" else E4M3,
        tokens_over=[groups.cp] if groups.cp.size() > 1 else [],
        inputs_over=[] if by_outputs else tensor,
        outputs_over=tensor if by_outputs else [],
        gathers_over=groups.tp if gathers else None,
        sums_over=groups.tp if tensor and by_outputs and not gathers else None,
        adds_to_main_gradient=training.gradient_accumulation_fusion,
    )


def linear(x: torch.Tensor, weight_NK: torch.Tensor, how: Fp8) -> torch.Tensor:
    """Return X W^T, differentiable. x: [sequence, batch, K]; the result has N in the place of K."""
    return _uncompiled(x, weight_NK, how)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Fp8) -> torch.Tensor:
        recipe, x = how.recipe, x.contiguous()
        whole, _ = _gathered(x, how.gathers_over)
        x_TK = _quantize(_rows(whole), recipe.activations, E4M3, how, (how.tokens_over, how.inputs_over))
        weight_NK = _quantize(weight, recipe.weights, E4M3, how, (how.outputs_over, how.inputs_over))
        ctx.how = how
        ctx.main_grad = getattr(weight, "main_grad", None) if how.adds_to_main_gradient else None
        # The backward pass rounds again, and needs no message for that where a block is the same when it is turned.
        ctx.save_for_backward(x, weight, x_TK.largest, weight_NK.largest)
        return product(x_TK, weight_NK, x.dtype, fast_sums=_adds_fast(recipe)).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, x_largest, weight_largest = ctx.saved_tensors
        how: Fp8 = ctx.how
        recipe = how.recipe
        for_x, for_weight, _ = ctx.needs_input_grad
        whole, arrives = _gathered(x, how.gathers_over, waits=False) if for_weight else (None, None)
        grad_TN = _rows(grad)
        rounded_TN = _quantize(grad_TN, recipe.activations, how.gradients, how, _cut_of_gradient(how))
        grad_x, reduced = None, None
        if for_x:
            weight_KN = _turned(weight, recipe.weights, how, (how.outputs_over, how.inputs_over), weight_largest)
            whole_grad = product(rounded_TN, weight_KN, x.dtype).view(*grad.shape[:-1], -1)
            grad_x, reduced = _reduced(whole_grad, how)
        grad_weight = None
        if for_weight:
            if arrives is not None:
                arrives.wait()
            x_KT = _turned(_rows(whole), recipe.activations, how, (how.tokens_over, how.inputs_over), x_largest)
            if recipe.activations == recipe.activations.turned:
                grad_NT = rounded_TN.transposed()
            else:
                turned = recipe.activations.turned
                grad_NT = _quantize(grad_TN, turned, how.gradients, how, _cut_of_gradient(how)).transposed()
            grad_weight = _weight_gradient(grad_NT, x_KT, weight, ctx.main_grad)
        if reduced is not None:
            reduced.wait()
        return grad_x, grad_weight, None


# A compiled layer is compiled up to here and from here on; what rounds has been compiled by itself.
_uncompiled: Any = torch.compiler.disable(_Linear.apply)


def _cut_of_gradient(how: Fp8) -> tuple[Sequence[ProcessGroup], Sequence[ProcessGroup]]:
    return how.tokens_over, how.outputs_over


def _quantize(
    x: torch.Tensor,
    block: Block,
    dtype: torch.dtype,
    how: Fp8,
    cut: tuple[Sequence[ProcessGroup], Sequence[ProcessGroup]],
    largest: torch.Tensor | None = None,
) -> Quantized:
    return quantize(x, block, dtype, powers_of_two=how.recipe.powers_of_two, cut=cut, largest=largest)


def _turned(
    x: torch.Tensor,
    block: Block,
    how: Fp8,
    cut: tuple[Sequence[ProcessGroup], Sequence[ProcessGroup]],
    largest: torch.Tensor,
) -> Quantized:
    """Return x^T in E4M3, for a matrix product of the backward pass, which sums over the rows of x.

    Args:
        x: the matrix before quantization; the forward pass quantized it for a product that sums over its columns.
        block: the part of x that shared one scale in the forward pass.
        how: FP8 settings of the layer.
        cut: the ranks that rows and columns of x are divided over.
        largest: the largest value of each block in the forward pass, used again where the transposed block is the same.
    """
    same = block == block.turned
    return _quantize(x, block.turned, E4M3, how, cut, largest if same else None).transposed()


def _adds_fast(recipe: Recipe) -> bool:
    """Return whether a forward product may add with fewer bits, as Transformer Engine's do but for blocks."""
    return recipe.weights.rows != recipe.weights.columns or recipe.weights.rows is None


def _rows(x: Any) -> torch.Tensor:
    return x.reshape(-1, x.size(-1)).contiguous()


def _gathered(
    x: torch.Tensor, group: ProcessGroup | None, *, waits: bool = True
) -> tuple[torch.Tensor, torch.distributed.Work | None]:
    """Return x of all ranks of `group`, and the handle to wait for before it is read."""
    if group is None:
        return x, None
    whole = x.new_empty((x.size(0) * group.size(), *x.shape[1:]))
    arrives = torch.distributed.all_gather_into_tensor(whole, x, group=group, async_op=not waits)
    return whole, arrives


def _reduced(grad_x: torch.Tensor, how: Fp8) -> tuple[torch.Tensor, torch.distributed.Work | None]:
    """Return the gradient of this rank's x, and the handle to wait for before it is read."""
    if how.sums_over is not None:
        return grad_x, torch.distributed.all_reduce(grad_x, group=how.sums_over, async_op=True)
    if how.gathers_over is None:
        return grad_x, None
    own = grad_x.new_empty((grad_x.size(0) // how.gathers_over.size(), *grad_x.shape[1:]))
    return own, torch.distributed.reduce_scatter_tensor(own, grad_x, group=how.gathers_over, async_op=True)


def _weight_gradient(
    grad_NT: Quantized, x_KT: Quantized, weight: torch.Tensor, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Return dW, or add it to the main gradient in fp32 and return its stand-in for autograd."""
    if main_grad is None:
        return product(grad_NT, x_KT, weight.dtype)
    add_(main_grad, product(grad_NT, x_KT, torch.float32))
    return replaces_gradient(weight)
