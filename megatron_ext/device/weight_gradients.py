"""Adds the gradient of a weight matrix to a buffer in the matrix product itself.

megatron-core asks apex's `fused_weight_gradient_mlp_cuda` for that (`gradient_accumulation_fusion`): the product of a
linear layer's backward pass is added to the fp32 main gradient by the kernel that computes it, so that it is never
written in 16 bits, read again and added. torch has the operation as well. `stand_in` puts it in apex's place.

Shapes: N tokens, V rows of the weight (outputs), H columns (inputs).
"""

import importlib
from typing import Any

import torch

_LAYERS = "megatron.core.tensor_parallel.layers"


def add_product_(sum_VH: torch.Tensor, grad_NV: torch.Tensor, x_NH: torch.Tensor) -> None:
    """Add grad^T x to `sum_VH`, in place.

    In one dtype it is one product that adds. With 16-bit factors and a sum in fp32 so it is on a GPU, which rounds
    nothing to 16 bits; torch has no such kernel for a CPU, where the product is rounded to 16 bits and then added, as
    without this function.
    """
    grad_VN = grad_NV.t()
    if sum_VH.dtype == grad_NV.dtype:
        sum_VH.addmm_(grad_VN, x_NH)
    elif sum_VH.dtype == torch.float32 and sum_VH.device.type == "cuda":
        torch.addmm(sum_VH, grad_VN, x_NH, out_dtype=torch.float32, out=sum_VH)
    else:
        sum_VH.add_(grad_VN @ x_NH)


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


def replaces_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Say that the main gradient of `weight` has this gradient already, and return what autograd gets in its place.

    That has the shape of a gradient, since megatron-core's hooks ask whether there is one, and no meaning; it is zero
    where autograd adds another gradient to it (tied embeddings on one stage).
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    added_to = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if added_to else torch.empty_like(weight)
