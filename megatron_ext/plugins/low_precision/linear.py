"""Computes the linear layers of attention and MLP in few bits (--fp8-format, --fp4-format).

Of Y = X W^T, all three products are in the formats of a recipe (`formats.py`): Y itself, dX = dY W, and dW = dY^T X.
Weights stay in their precision: they are rounded at each use, from the value that the forward pass has without, and
the optimizer's masters, checkpoints and exports know nothing of it.

What is rounded with which scale does not depend on the layout: a scale for more of a matrix than a rank holds is found
together with the tensor-parallel ranks (where outputs or inputs of the layer are divided) and the context-parallel
ranks (tokens). Data-parallel ranks and microbatches have matrices of their own.

Outside of training (evaluation, tasks, generation) these layers multiply as without few bits.

Shapes: T tokens (sequence * batch), K inputs, N outputs, each of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import Config
from megatron_ext.device.weight_gradients import add_, replaces_gradient
from megatron_ext.plugins.low_precision.formats import Format, Recipe, recipe_of
from megatron_ext.plugins.low_precision.gathers import EightBits
from megatron_ext.plugins.low_precision.products import product
from megatron_ext.plugins.low_precision.quantize import Cut, Quantized, quantize
from megatron_ext.plugins.low_precision.random_numbers import Draw, Places


@dataclass(frozen=True)
class Multiplication:
    """Settings of one linear layer that multiplies in few bits."""

    recipe: Recipe
    tokens_over: Sequence[ProcessGroup] = ()
    """The ranks that tokens are divided over in the product; none where this rank has all of a microbatch."""
    inputs_over: Sequence[ProcessGroup] = ()
    outputs_over: Sequence[ProcessGroup] = ()
    gathers_over: ProcessGroup | None = None
    """The ranks whose tokens are gathered first (sequence parallelism)."""
    sums_over: ProcessGroup | None = None
    """The ranks that each have a part of dX, which is otherwise whole, or is scattered over `gathers_over`."""
    adds_to_main_gradient: bool = False
    draw: Draw | None = None
    """Random numbers of dY, where the recipe draws some."""
    gathered: EightBits | None = None
    """The weight as it is gathered, where that is in eight bits."""
    matrix: int = 0
    """Index of the weight among those that are gathered as one."""

    def rounded(self, weight_NK: torch.Tensor) -> Quantized:
        """Return W for the forward product: as it was gathered, or rounded here. Collective as `quantize`."""
        if self.gathered is not None and self.gathered.values is not None:
            return self.gathered.quantized(self.matrix)
        return quantize(weight_NK, self.recipe.forward.right, cut=self.of_weights)

    def turned(self, weight_NK: torch.Tensor, largest: torch.Tensor | None = None) -> Quantized:
        """Return W^T for the input gradient.

        Args:
            largest: largest values of the blocks of W in the forward product, where they are known.
        """
        if self.gathered is not None and self.gathered.values is not None:
            return self.gathered.quantized(self.matrix).transposed()
        format, before = self.recipe.input_gradient.right, self.recipe.forward.right
        return turned(weight_NK, format, self.of_weights, None if largest is None else before, largest)

    @property
    def of_inputs(self) -> Cut:
        """The ranks that rows and columns of X are divided over."""
        return self.tokens_over, self.inputs_over

    @property
    def of_weights(self) -> Cut:
        """The ranks that rows and columns of W are divided over."""
        return self.outputs_over, self.inputs_over

    @property
    def of_gradients(self) -> Cut:
        """The ranks that rows and columns of dY are divided over."""
        return self.tokens_over, self.outputs_over


def settings(
    config: Config,
    tensor_group: ProcessGroup,
    context_group: ProcessGroup | None,
    *,
    divides: str,
    name: str = "",
    stride: int = 1,
) -> Multiplication:
    """Return the settings of a layer whose outputs (column-parallel) or inputs (row-parallel) are divided.

    Args:
        config: the resolved configuration, with --fp8-format or --fp4-format.
        tensor_group: the ranks that divide the weight.
        context_group: the ranks that divide the tokens of a microbatch; None where this rank has all.
        divides: "outputs" or "inputs".
        name: global name of its weight.
        stride: number of tensors one above another in the weight, each of which is divided.
    """
    tensor = [tensor_group] if tensor_group.size() > 1 else []
    context = [] if context_group is None or context_group.size() == 1 else [context_group]
    by_outputs = divides == "outputs"
    gathers = bool(tensor) and by_outputs and config.layout.sequence_parallel
    recipe, draw = recipe_of(config), None
    if recipe.is_random:
        tokens = Places(context[0].rank(), context[0].size(), mirrored=True) if context else Places()
        divided = tensor and by_outputs
        outputs = Places(tensor[0].rank(), tensor[0].size(), stride) if divided else Places()
        draw = Draw(config.training.seed, name, tokens, outputs)
    return Multiplication(
        recipe=recipe,
        tokens_over=context,
        inputs_over=[] if by_outputs else tensor,
        outputs_over=tensor if by_outputs else [],
        gathers_over=tensor_group if gathers else None,
        sums_over=tensor_group if tensor and by_outputs and not gathers else None,
        adds_to_main_gradient=config.training.gradient_accumulation_fusion,
        draw=draw,
    )


def linear(x: torch.Tensor, weight_NK: torch.Tensor, how: Multiplication) -> torch.Tensor:
    """Return X W^T, differentiable. x: [sequence, batch, K]; the result has N in the place of K."""
    return _uncompiled(x, weight_NK, how)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Multiplication) -> torch.Tensor:
        of_x, of_weight = how.recipe.forward
        x = x.contiguous()
        whole, _ = _gathered(x, how.gathers_over)
        x_TK = quantize(_rows(whole), of_x, cut=how.of_inputs)
        weight_NK = how.rounded(weight)
        ctx.how = how
        ctx.main_grad = getattr(weight, "main_grad", None) if how.adds_to_main_gradient else None
        # The backward pass rounds again, and needs no message for that where a block is the same when it is turned.
        ctx.save_for_backward(x, weight, x_TK.largest, weight_NK.largest)
        return product(x_TK, weight_NK, x.dtype, fast_sums=adds_fast(of_weight)).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, x_largest, weight_largest = ctx.saved_tensors
        how: Multiplication = ctx.how
        of_grad, (of_turned, of_x) = how.recipe.input_gradient.left, how.recipe.weight_gradient
        for_x, for_weight, _ = ctx.needs_input_grad
        whole, arrives = _gathered(x, how.gathers_over, waits=False) if for_weight else (None, None)
        grad_TN = _rows(grad)
        rounded_TN = quantize(grad_TN, of_grad, cut=how.of_gradients, draw=how.draw)
        grad_x, reduced = None, None
        if for_x:
            whole_grad = product(rounded_TN, how.turned(weight, weight_largest), x.dtype).view(*grad.shape[:-1], -1)
            grad_x, reduced = _reduced(whole_grad, how)
        grad_weight = None
        if for_weight:
            if arrives is not None:
                arrives.wait()
            x_KT = turned(_rows(whole), of_x, how.of_inputs, how.recipe.forward.left, x_largest, how.draw)
            if of_grad == of_turned.turned:
                grad_NT = rounded_TN.transposed()
            else:
                grad_NT = turned(grad_TN, of_turned, how.of_gradients, draw=how.draw)
            grad_weight = _weight_gradient(grad_NT, x_KT, weight, ctx.main_grad)
        if reduced is not None:
            reduced.wait()
        return grad_x, grad_weight, None


# A compiled layer is compiled up to here and from here on; what rounds has been compiled by itself.
_uncompiled: Any = torch.compiler.disable(_Linear.apply)


def turned(
    x: torch.Tensor,
    format: Format,
    cut: Cut,
    before: Format | None = None,
    largest: torch.Tensor | None = None,
    draw: Draw | None = None,
) -> Quantized:
    """Return x^T in `format`, for a matrix product of the backward pass, which sums over the rows of x.

    Args:
        x: the matrix before quantization.
        cut: the ranks that rows and columns of x are divided over.
        before: format of x in the forward pass, in a product that sums over its columns.
        largest: the largest value of each block in the forward pass, used again where the transposed block is the same.
        draw: random numbers of x, where the format draws some.
    """
    if format.rotated:
        return quantize(x.t().contiguous(), format, cut=(cut[1], cut[0]), draw=None if draw is None else draw.turned)
    same = before is not None and before == format.turned and not format.has_tensor_scale
    return quantize(x, format.turned, cut=cut, largest=largest if same else None, draw=draw).transposed()


def adds_fast(of_weight: Format) -> bool:
    """Return whether a forward product may add with fewer bits, as Transformer Engine's do but for blocks."""
    return of_weight.block.columns is None


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


def _reduced(grad_x: torch.Tensor, how: Multiplication) -> tuple[torch.Tensor, torch.distributed.Work | None]:
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
