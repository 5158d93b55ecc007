"""Computes the operations that torch does slowly on a CPU, each next to torch's own, which it equals.

Matrix products: torch has two libraries for them, its BLAS (MKL on x86), which it asks for fp32, and oneDNN, which it
asks for 16-bit types alone. Which one is faster depends on the vectors that each of them uses (`GEMMS`).

RMSNorm: on a CPU torch has no kernel for it, so that autograd runs back through every operation it is made of.

SwiGLU: autograd makes the gradients of gate and up apart, and then puts them next to each other; written out, each is
made in its place.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron_ext.device import split_backward
from megatron_ext.device.triton import kernel_choice
from megatron_ext.device.weight_gradients import place_of_first

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

_FEW_ROWS = 32
_LARGE = 1 << 20
"""Elements of a matrix from which on oneDNN is the faster one with AVX-512, be the rows few or many."""

_BLACKWELL = 10  # compute capability, major

_ROWS = 32
"""Numbers of rows of an expert that oneDNN multiplies are multiples of it."""

_WRITTEN_IN_PLACE = 1 << 17
"""Elements of a matrix from which on a gradient that need not be copied is worth an autograd function in Python."""

GEMMS = ("blas", "mixed", "onednn")
"""Libraries that multiply fp32 matrices on a CPU: torch's BLAS, which is MKL on x86; oneDNN except for weight
gradients, of which it would copy an operand; or oneDNN for all.

With AVX2 both reach the same, and BLAS does without an autograd function in Python where matrices are small. With
AVX-512 oneDNN is ahead in forward products and input gradients: a little where MKL uses AVX-512 too or AVX2 is as fast,
and 2.2 times where MKL does without it on a processor that is twice as fast with it (docs/decisions.md)."""

_FAR_AHEAD = 1.6
"""How many times as fast as BLAS oneDNN must be to take the weight gradients too. Measured processors lie at 1.1 or
2.2, so that noise does not decide."""


def gemm_by_ability() -> str:
    """Return the entry of `GEMMS` that follows from the vectors that torch uses on this processor, without measuring.
    ATEN_CPU_CAPABILITY counts."""
    return "mixed" if _HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512" else "blas"


@functools.cache
def measured_gemm() -> str:
    """Return the entry of `GEMMS` for this processor. Where it has AVX-512, some products tell whether BLAS uses it,
    once in a process and those that are forked from it."""
    by_ability = gemm_by_ability()
    if by_ability != "mixed":
        return by_ability
    x, weight, threads = torch.ones(512, 512), torch.ones(512, 512), torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        ratio = _ratio(lambda: F.linear(x, weight), lambda: _product(x, weight))
    torch.set_num_threads(threads)
    return "onednn" if ratio >= _FAR_AHEAD else by_ability


def _ratio(one: Callable[[], object], other: Callable[[], object], calls: int = 8) -> float:
    """Return the shortest time of `calls` calls of `one` over the shortest of `other`, in turns: CPU seconds of this
    thread, so that the machine's load counts little (1.01 to 1.18 in 25 tries at a load of 16 on two cores)."""
    seconds = []
    for call in (one, other) * calls:
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return min(seconds[::2]) / min(seconds[1::2])


_gemm = gemm_by_ability()


def use_gemm(name: str) -> None:
    """Have fp32 products of this process on a CPU computed by the entry `name` of `GEMMS` from now on."""
    global _gemm
    assert name in GEMMS, name
    _gemm = name if _HAS_ONEDNN else "blas"


def nothing_is_trained() -> bool:
    """Return whether torch is in inference mode; False in compiled code, which cannot ask and is only used for
    training."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x A^T + b, differentiable as F.linear is. x: [..., in]; weight: [out, in]; bias: [out]."""
    if nothing_is_trained():
        return _linear_without_gradient(x, weight, bias)
    if split_backward.splits(weight):
        return split_backward.linear(x, weight, bias)
    # The compiler fuses nothing with an operation that it does not know.
    left_to_the_compiler = _gemm != "onednn" and torch.compiler.is_compiling()
    gains = _gemm != "blas" or weight.numel() >= _WRITTEN_IN_PLACE
    if gains and _is_fp32_on_cpu(x, weight) and not left_to_the_compiler:
        return _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return F.linear(x, weight, bias)


def linear_by_expert(x_TI: torch.Tensor, weight_EOI: torch.Tensor, tokens_E: torch.Tensor) -> torch.Tensor:
    """Return rows of x times the transposed matrix of their expert, [T, O], differentiable.

    Args:
        tokens_E: rows of each expert, integers; x is sorted by it.
    """
    tokens = tokens_E.tolist()
    if _is_fp32_on_cpu(x_TI, weight_EOI) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _LinearByExpert.apply(x_TI, weight_EOI, tokens)  # pyright: ignore[reportReturnType]
    parts = zip(x_TI.split(tokens), weight_EOI.unbind(0), strict=True)
    # An expert without tokens still takes part, so that its gradient is zero and not missing.
    return torch.cat([linear(x, weight) if len(x) else F.linear(x, weight) for x, weight in parts])


def grouped_linear(x_TI: torch.Tensor, weight_EOI: torch.Tensor, tokens_E: torch.Tensor) -> torch.Tensor:
    """Return the same as `linear_by_expert`, [T, O], in one grouped product of 16-bit operands."""
    tokens_E = tokens_E.to(x_TI.device)
    ends = tokens_E.to(torch.int32).cumsum(0, dtype=torch.int32)
    if leaves_empty_groups(x_TI):
        weight_EOI = _ZeroGradientOfEmpty.apply(weight_EOI, tokens_E == 0)  # pyright: ignore[reportAssignmentType]
    return F.grouped_mm(x_TI, weight_EOI.transpose(1, 2), offs=ends)


def leaves_empty_groups(x: torch.Tensor) -> bool:
    """Return whether torch's grouped product leaves whatever was in memory as the gradient of a matrix without rows, as
    it does on Blackwell (pytorch/pytorch#172439)."""
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] >= _BLACKWELL


class _ZeroGradientOfEmpty(torch.autograd.Function):
    """Passes matrices through, and the gradients of those that have rows."""

    @staticmethod
    def forward(ctx: Any, weight_EOI: torch.Tensor, empty_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(empty_E)
        return weight_EOI.view_as(weight_EOI)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (empty_E,) = ctx.saved_tensors
        return grad.masked_fill(empty_E[:, None, None], 0.0), None  # a product with 0 would keep NaN


def _linear_without_gradient(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `linear` in inference mode, where oneDNN's 30 us a call can be more than the product itself."""
    few = x.numel() <= _FEW_ROWS * x.size(-1)
    if _gemm != "blas" and (weight.numel() >= _LARGE or not few) and _is_fp32_on_cpu(x, weight):
        return _product(x, weight, bias)
    return F.linear(x, weight, bias)


def cross_entropy(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return the loss of every token in nats, fp32 [N], computed in fp32."""
    if kernel_choice.take(logits_NV):
        from megatron_ext.device.triton.cross_entropy import cross_entropy as kernel

        return kernel(logits_NV, labels_N)
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="none")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension; x: [..., hidden], weight: [hidden]."""
    if nothing_is_trained():
        return F.rms_norm(x, weight.shape, weight, eps)
    if kernel_choice.take_rows(x):
        from megatron_ext.device.triton import norm

        return norm.rms_norm(x, weight, eps)
    # The compiler knows torch's own, and makes one kernel of it.
    if _is_fp32_on_cpu(x, weight) and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (Shazeer 2020, arXiv:2002.05202). x: [..., 2 * ffn], gate, then up; result: [..., ffn]."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(x)  # pyright: ignore[reportReturnType]


def _is_fp32_on_cpu(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x A^T + b. Either matrix may be a transposed view; oneDNN reads it as it lies."""
    if torch.compiler.is_compiling():
        return _compiled_product(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# The compiler has a rule of its own for this operation, for weights that never change. Under another name it calls
# the operation as it is; eager code does without the name, which costs time at every call.
@torch.library.custom_op("megatron_ext::linear", mutates_args=())
def _compiled_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@_compiled_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.size(0)))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias) if _gemm == "blas" else _product(x, weight, bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.size(-1))
        return (
            None if not for_x else grad @ weight if _gemm == "blas" else _product(grad, weight.t()),
            _weight_gradient(rows, x.reshape(-1, x.size(-1)), weight) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _weight_gradient(grad_NV: torch.Tensor, x_NH: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if _gemm == "onednn":
        return _product(grad_NV.t(), x_NH.t())
    place = place_of_first(weight)
    return grad_NV.t() @ x_NH if place is None else torch.mm(grad_NV.t(), x_NH, out=place)


class _LinearByExpert(torch.autograd.Function):
    """Multiplies expert by expert as `_Linear` does. The gradients of all matrices are one tensor, into which each is
    written: autograd would make them one by one, and a copy of all."""

    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, weight_EOI: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(x_TI, weight_EOI)
        ctx.tokens = tokens
        return _products_by_expert(x_TI, weight_EOI, tokens)

    @staticmethod
    def backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TI, weight_EOI = ctx.saved_tensors
        for_x, for_weight = None, None
        if ctx.needs_input_grad[0]:
            for_x = _products_by_expert(grad_TO, weight_EOI.transpose(1, 2), ctx.tokens)
        if ctx.needs_input_grad[1]:
            place = place_of_first(weight_EOI)
            for_weight = torch.empty_like(weight_EOI) if place is None else place
            for g, x, out in zip(grad_TO.split(ctx.tokens), x_TI.split(ctx.tokens), for_weight, strict=True):
                if _gemm == "onednn" and len(x):
                    out.copy_(_product(g.t(), x.t()))
                else:
                    torch.mm(g.t(), x, out=out)
        return for_x, for_weight, None


def _products_by_expert(x_TI: torch.Tensor, weight_EOI: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return rows of x times the transposed matrix of their expert, [T, O].

    oneDNN makes machine code for each number of rows, which takes as long as the product of 200 of them, and experts
    have another number at each step. So it multiplies a multiple of `_ROWS` of them, of neighbors too, which changes
    no bit of the others.
    """
    product_TO, begin = x_TI.new_empty(len(x_TI), weight_EOI.size(1)), 0
    for rows, weight in zip(tokens, weight_EOI, strict=True):
        own = slice(begin, begin + rows)
        if _gemm == "blas":
            torch.mm(x_TI[own], weight.t(), out=product_TO[own])
        elif rows:
            multiplied = min(-(-rows // _ROWS) * _ROWS, len(x_TI)) if rows > 1 else 1  # a single one: other sums
            first = min(begin, len(x_TI) - multiplied)
            window = _product(x_TI[first : first + multiplied], weight)
            product_TO[own] = window[begin - first :][:rows]
        begin += rows
    return product_TO


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        normalized = x * inverse
        ctx.save_for_backward(normalized, inverse, weight)
        return normalized * weight

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        normalized, inverse, weight = ctx.saved_tensors
        products = (grad * normalized).flatten(0, -2)
        # The component that would change the norm of x itself has no effect and is removed.
        radial = torch.mv(products, weight).div_(weight.numel()).view(inverse.shape)
        for_x = (grad * weight).addcmul_(normalized, radial, value=-1).mul_(inverse)
        return for_x, products.sum(0), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        for_x = torch.empty_like(x)
        for_gate, for_up = for_x.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=for_gate)
        torch.mul(grad, activated, out=for_up)
        return for_x
