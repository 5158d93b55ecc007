"""Decides whether the kernels of this folder compute, and starts them."""

from typing import Any

import torch

WIDEST = 8192
"""Channels of the longest row that a program of a norm holds in registers; of twice as many it would keep some in
memory (tests/unit/device/test_triton_compiled.py)."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_used = False


def use(on: bool) -> None:
    """Have the kernels compute from now on, or torch's operations (--no-triton-kernels)."""
    global _used
    _used = on


def take(x: torch.Tensor) -> bool:
    """Return whether the kernels compute the operations on x.

    Under torch.compile they do not: the compiler makes such kernels itself, and fuses them with the operations before
    and after.
    """
    return (
        _used
        and x.device.type == "cuda"
        and x.dtype in _DTYPES
        and not torch.compiler.is_compiling()
        and not torch.is_inference_mode_enabled()
    )


def take_rows(x: torch.Tensor) -> bool:
    """Return whether the kernels compute norms of the rows of x, over its last dimension."""
    return take(x) and x.size(-1) <= WIDEST


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the current device, unless there is nothing to compute.

    Args:
        kernel: a function compiled by `triton.jit`.
        grid: numbers of programs, up to three; the second and the third at most 65,535.
    """
    if 0 not in grid:
        # Said, since its default is another one from Triton 3.10 on: products and sums are rounded once.
        kernel[grid](*arguments, enable_fp_fusion=True, **constants)
