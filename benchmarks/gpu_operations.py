"""Runs one operation of benchmarks/gpu_session.py against float64: `gpu_operations.py DEVICE NAME`. Prints RESULT and
JSON; exit code 1 where it is less exact than its bound."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

TRUE_ROWS, ROWS = 50_257, 50_304
BOUND = {"cuda": 1e-3, "cpu": 4e-3}
"""Error of a sum in fp32 of products of bf16; a CPU rounds each product to bf16."""


def main(device: str, name: str) -> None:
    from megatron_ext import device as devices

    devices.install(device, own_kernels=True)
    operations = {"weight gradient": weight_gradient, "loss": loss, "padded vocabulary": padded_vocabulary}
    figures = operations[name](device)
    print("RESULT", json.dumps(figures), flush=True)
    if any(figure > BOUND[device] for key, figure in figures.items() if key.startswith("error")):
        sys.exit(1)


def weight_gradient(device: str) -> dict[str, float]:
    """Return the error and the time of a product that adds, and the time of a product and a sum."""
    from megatron_ext.device.weight_gradients import add_product_

    tokens, rows, columns = (8192, 6144, 2048) if device == "cuda" else (64, 96, 32)
    grad, x = (torch.randn(tokens, size, device=device, dtype=torch.bfloat16) for size in (rows, columns))
    main = torch.randn(rows, columns, device=device)
    exact = main.double() + grad.double().t() @ x.double()
    add_product_(main, grad, x)
    return {
        "error": _error(main, exact),
        "ms": _milliseconds(lambda: add_product_(main, grad, x), device),
        "ms, product then sum": _milliseconds(lambda: main.add_(grad.t() @ x), device),
    }


def loss(device: str) -> dict[str, float]:
    """Return errors, time and peak memory of the output layer and its loss in one, and in two."""
    from megatron_ext.model.linear_cross_entropy import Vocabulary, linear_cross_entropy

    tokens, hidden = (8192, 768) if device == "cuda" else (64, 32)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(ROWS, hidden, device=device).mul_(0.02).bfloat16().requires_grad_()
    labels, counts = torch.randint(0, TRUE_ROWS, (tokens,), device=device), torch.ones(tokens, device=device)

    def fused() -> torch.Tensor:
        return linear_cross_entropy(x, weight, labels, counts, Vocabulary(TRUE_ROWS))

    def plain() -> torch.Tensor:
        logits = F.linear(x, weight)
        logits.detach()[:, TRUE_ROWS:] = torch.finfo(logits.dtype).min
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    few = slice(0, 512)
    exact = F.cross_entropy(x[few].double() @ weight[:TRUE_ROWS].double().t(), labels[few], reduction="sum")
    made = linear_cross_entropy(x[few], weight, labels[few], counts[few], Vocabulary(TRUE_ROWS))
    found = {"error": _error(made, exact)}
    for name, function in (("fused", fused), ("plain", plain)):
        found[f"ms, {name}"] = _milliseconds(lambda function=function: function().backward(), device)
        found[f"peak bytes, {name}"] = _peak(
            lambda function=function: torch.autograd.grad(function(), (x, weight)), device
        )
    return found


def padded_vocabulary(device: str) -> dict[str, float]:
    """Return the times of the output layer's three products, without and with padding."""
    tokens, hidden = (32_768, 768) if device == "cuda" else (64, 32)
    found = {}
    for rows in (TRUE_ROWS, ROWS):
        x, weight, grad = (
            torch.randn(size, device=device, dtype=torch.bfloat16)
            for size in ((tokens, hidden), (rows, hidden), (tokens, rows))
        )
        products = lambda x=x, weight=weight, grad=grad: (x @ weight.t(), grad @ weight, grad.t() @ x)  # noqa: E731
        found[f"ms, {rows}"] = _milliseconds(products, device)
    return found


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def _milliseconds(call: Callable[[], Any], device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for _ in range(13):
        wait()
        began = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - began)
    return round(1000 * statistics.median(seconds[3:]), 3)


def _peak(call: Callable[[], Any], device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main(*sys.argv[1:])
