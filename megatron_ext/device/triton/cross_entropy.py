"""Cross-entropy of logits, -log softmax(logits)[label], and its gradient, (softmax(logits) - one-hot) times its own.

The forward pass reads the logits once, in the type that they have: a running maximum and the sum of exponentials below
it give their log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3). That is kept, one number a row,
and the gradient is one pass more. torch's operations make three tensors of the logits' size in fp32.

Shapes: N tokens, V entries of the vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_ext.device.triton.kernel_choice import launch

_BLOCK = 4096
"""Logits that a program holds at a time."""


def cross_entropy(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return the loss of every token in nats, fp32 [N]; 0, without a gradient, where a label is negative, as
    `F.cross_entropy` has it for -100. The gradient of the logits has their type."""
    return _CrossEntropy.apply(logits_NV, labels_N)  # pyright: ignore[reportReturnType]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        labels = labels.contiguous()
        rows, columns = logits.shape
        losses, log_sums = logits.new_empty(2, rows, dtype=torch.float32)
        launch(
            cross_entropy_forward,
            (rows,),
            *(logits, labels, losses, log_sums, columns, logits.stride(0)),
            BLOCK=_BLOCK,
            num_warps=8,
        )
        ctx.save_for_backward(logits, labels, log_sums)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels, log_sums = ctx.saved_tensors
        rows, columns = logits.shape
        made = logits.new_empty(rows, columns)
        launch(
            cross_entropy_backward,
            (rows,),
            *(grad.contiguous(), logits, labels, log_sums, made, columns, logits.stride(0)),
            BLOCK=_BLOCK,
            num_warps=8,
        )
        return made, None


@triton.jit
def cross_entropy_forward(logits, labels, losses, log_sums, columns, row_stride, BLOCK: tl.constexpr):
    """Computes the loss of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * tl.cast(row_stride, tl.int64)
    largest, total = float("-inf"), 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(place + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(values, axis=0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(values - largest), axis=0)
    log_sum = largest + tl.log(total)
    label = tl.load(labels + row)
    of_label = tl.load(place + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(label >= 0, log_sum - of_label, 0.0))
    tl.store(log_sums + row, log_sum)


@triton.jit
def cross_entropy_backward(grad, logits, labels, log_sums, made, columns, row_stride, BLOCK: tl.constexpr):
    """Computes the gradient of one row of logits."""
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * tl.cast(row_stride, tl.int64)
    target = made + row * tl.cast(columns, tl.int64)
    log_sum, label = tl.load(log_sums + row), tl.load(labels + row)
    given = tl.where(label >= 0, tl.load(grad + row), 0.0)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        values = tl.load(place + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.exp(values - log_sum) - tl.where(column == label, 1.0, 0.0)
        tl.store(target + column, (share * given).to(made.dtype.element_ty), mask=inside)
