"""Adds the gradient of a weight matrix to a buffer in the matrix product itself.

megatron-core asks apex's `fused_weight_gradient_mlp_cuda` for that (`gradient_accumulation_fusion`): the product of a
linear layer's backward pass is added to the fp32 main gradient by the kernel that computes it, so that it is never
written in 16 bits, read again and added. torch has the operation as well. `stand_in` puts it in apex's place.

When a step begins, a main gradient still holds the sum of the step before. It is not zeroed: `expect_first` marks it,
and the first gradient of the step overwrites it (`takes_first`) and is not added to zeros.

Shapes: N tokens, V rows of the weight (outputs), H columns (inputs).
"""

import importlib
from typing import Any

import torch

_LAYERS = "megatron.core.tensor_parallel.layers"


def expect_first(main_grad: torch.Tensor) -> None:
    """Make the next gradient overwrite `main_grad`."""
    main_grad.expects_first = True  # pyright: ignore[reportAttributeAccessIssue]


def takes_first(main_grad: torch.Tensor) -> bool:
    """Return whether `main_grad` expects its first gradient, and clear the mark: the caller must write all of it."""
    expected = getattr(main_grad, "expects_first", False)
    if expected:
        main_grad.expects_first = False  # pyright: ignore[reportAttributeAccessIssue]
    return expected


def place_of_first(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the main gradient of `weight` if it expects its first gradient: a product may write the gradient that it
    returns to autograd into this tensor. None if it does not expect one, or another product has written it."""
    main_grad: Any = getattr(weight, "main_grad", None)
    if getattr(main_grad, "expects_first", False) is not True:
        return None
    main_grad.expects_first = "written"  # still expected: `write_` sees whether this is all of it
    return main_grad.detach()


def write_(main_grad: torch.Tensor, gradient: torch.Tensor) -> None:
    """Write the first gradient of a step, with the bits of its sum with zeros (-0.0 becomes 0.0, unlike in a copy). A
    product may have written it already (`place_of_first`)."""
    if gradient.data_ptr() != main_grad.data_ptr():
        torch.add(gradient, 0.0, out=main_grad)


def add_(main_grad: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to the sum of this step, or write it if it is the first."""
    if takes_first(main_grad):
        write_(main_grad, gradient)
    else:
        main_grad.add_(gradient)


def add_product_(sum_VH: torch.Tensor, grad_NV: torch.Tensor, x_NH: torch.Tensor) -> None:
    """Add grad^T x to `sum_VH`, in place, or write it where it is the first.

    In one dtype it is one product that adds. With 16-bit factors and a sum in fp32 so it is on a GPU, which rounds
    nothing to 16 bits; torch has no such kernel for a CPU, where the product is rounded to 16 bits and then added, as
    without this function.
    """
    grad_VN = grad_NV.t()
    if sum_VH.dtype == grad_NV.dtype:
        sum_VH.addmm_(grad_VN, x_NH, beta=_share_of_sum(sum_VH))
    elif sum_VH.dtype == torch.float32 and sum_VH.device.type == "cuda":
        beta = _share_of_sum(sum_VH)
        torch.addmm(sum_VH, grad_VN, x_NH, out_dtype=torch.float32, beta=beta, out=sum_VH)
    else:
        add_(sum_VH, grad_VN @ x_NH)


def _share_of_sum(main_grad: torch.Tensor) -> int:
    # With 0 a product does not read the old content, which may be NaN.
    return 0 if takes_first(main_grad) else 1


class ProductsOfTorch:
    """Stands in for apex's module, with the names and the order of arguments by which megatron-core calls it."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Add grad^T x to a main gradient in fp32. x: [N, H]; grad: [N, V]; main_grad: [V, H]."""
        add_product_(main_grad, grad, x)

    @staticmethod
    def wgrad_gemm_accum_fp16(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Add grad^T x to a main gradient in 16 bits, likewise."""
        add_product_(main_grad, grad, x)


def stand_in() -> None:
    """Have megatron-core's linear layers add with torch's products, unless they have found apex's.

    Call it before a model with `gradient_accumulation_fusion` is built.
    """
    layers: Any = importlib.import_module(_LAYERS)
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = ProductsOfTorch
        layers._grad_accum_fusion_available = True


def products_write() -> bool:
    """Return whether the products that megatron-core's layers call write a first gradient; apex's always add."""
    layers: Any = importlib.import_module(_LAYERS)
    return layers.fused_weight_gradient_mlp_cuda is ProductsOfTorch


def replaces_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Mark that the main gradient of `weight` has this gradient already, and return the tensor that autograd gets in
    its place.

    The tensor has the shape of a gradient, since megatron-core's hooks check that there is one, but no meaning; it is
    zero where autograd adds another gradient to it (tied embeddings on one stage).
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    added_to = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if added_to else torch.empty_like(weight)
