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

SHORT, CALLS_OF_A_SHORT_ONE = 0.05, 20
"""Milliseconds below which a call is timed by so many."""

NORMS = {"cuda": ((32_768, 768), (8192, 2048), (8192, 4096)), "cpu": ((5, 48),)}
"""Tokens and channels; sizes of the CPU are for Triton's interpreter."""
HEADS = {"cuda": ((1024, 32, 12, 1, 64), (2048, 4, 16, 1, 128), (8192, 1, 8, 4, 128)), "cpu": ((4, 1, 1, 2, 16),)}
"""Sequence, batch, groups, queries of a group, channels."""
GATES = {"cuda": ((8192, 2048), (8192, 5504), (8192, 14336)), "cpu": ((3, 40),)}
"""Tokens and channels."""
LOGITS = {"cuda": ((8192, 32_000), (8192, 50_304), (4096, 128_256)), "cpu": ((5, 70),)}
"""Tokens and entries of the vocabulary."""
WEIGHTS = {"cuda": (24, 8, (2048, 2048)), "cpu": (2, 2, (7, 5))}
"""Matrices, vectors next to them, and the shape of a matrix."""


def main(device: str, name: str) -> None:
    from megatron_ext import device as devices

    devices.install(device, own_kernels=True)
    operations = {
        "weight gradient": weight_gradient,
        "loss": loss,
        "padded vocabulary": padded_vocabulary,
        "norms": norms,
        "heads": heads,
        "SwiGLU": activation,
        "cross-entropy": losses_of_tokens,
        "updates": updates,
        "ceilings": ceilings,
    }
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


def norms(device: str) -> dict[str, float]:
    """Return errors and times of our kernels of a norm, alone and of a sum, and of torch's operations."""
    from megatron_ext.device.triton.norm import norm_of_sum, rms_norm

    found: dict[str, float] = {}
    for tokens, hidden in NORMS[device]:
        x, residual, grad, onward = (
            torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_(leaf)
            for leaf in (True, True, False, False)
        )
        weight = torch.rand(hidden, device=device).add_(0.5).bfloat16().requires_grad_()

        def alone(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            return [rms_norm(x, weight, 1e-5)]

        def plain_alone(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            return [F.rms_norm(x, weight.shape, weight, 1e-5)]

        def of_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            return list(norm_of_sum(x, residual, weight, None, 1e-5))

        def plain_of_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            total = x + residual
            return [F.rms_norm(total, weight.shape, weight, 1e-5), total]

        found |= _beside(f"norm {hidden}", alone, plain_alone, [x, weight], [grad], device)
        found |= _beside(f"of sum {hidden}", of_sum, plain_of_sum, [x, residual, weight], [grad, onward], device)
    return found


def heads(device: str) -> dict[str, float]:
    """Return errors and times of heads out of their product by our kernel, and by torch's operations."""
    from megatron_ext.device.triton.rotary import split_heads
    from megatron_ext.parts.attention.rope import rotate_reference

    found: dict[str, float] = {}
    for sequence, batch, groups, per_group, channels in HEADS[device]:
        angles = torch.outer(
            torch.arange(sequence, device=device), 1e4 ** -torch.linspace(0, 1, channels // 2, device=device)
        )
        table = torch.stack((angles.cos(), angles.sin())).bfloat16()
        packed = torch.randn(sequence, batch, groups, (per_group + 2) * channels, device=device, dtype=torch.bfloat16)

        def ours(packed: torch.Tensor, table: torch.Tensor = table, channels: int = channels) -> list[torch.Tensor]:
            return list(split_heads(packed, table, channels))

        def plain(packed: torch.Tensor, table: torch.Tensor = table, channels: int = channels) -> list[torch.Tensor]:
            parts = packed.split([packed.size(-1) - 2 * channels, channels, channels], dim=-1)
            shape = (packed.size(0), packed.size(1), -1, channels)
            query, key, value = (part.reshape(shape).permute(1, 2, 0, 3) for part in parts)
            turned = [rotate_reference(x, table.to(x.dtype)) for x in (query, key)]
            return [*(x.contiguous() for x in turned), value.contiguous()]

        grads = [torch.randn_like(head) for head in ours(packed)]
        found |= _beside(f"heads {sequence} x {channels}", ours, plain, [packed.requires_grad_()], grads, device)
    return found


def activation(device: str) -> dict[str, float]:
    """Return errors and times of SwiGLU by our kernel, and by torch's operations."""
    from megatron_ext.device.triton.swiglu import swiglu

    def ours(both: torch.Tensor) -> list[torch.Tensor]:
        return [swiglu(both)]

    def plain(both: torch.Tensor) -> list[torch.Tensor]:
        gate, up = both.chunk(2, dim=-1)
        return [F.silu(gate) * up]

    found: dict[str, float] = {}
    for tokens, width in GATES[device]:
        both = torch.randn(tokens, 2 * width, device=device, dtype=torch.bfloat16).requires_grad_()
        grads = [torch.randn(tokens, width, device=device, dtype=torch.bfloat16)]
        found |= _beside(f"SwiGLU {width}", ours, plain, [both], grads, device)
    return found


def losses_of_tokens(device: str) -> dict[str, float]:
    """Return errors and times of the cross-entropy by our kernel, and by torch's operations."""
    from megatron_ext.device.triton.cross_entropy import cross_entropy

    found: dict[str, float] = {}
    for tokens, entries in LOGITS[device]:
        labels = torch.randint(0, entries, (tokens,), device=device)

        def ours(logits: torch.Tensor, labels: torch.Tensor = labels) -> list[torch.Tensor]:
            return [cross_entropy(logits, labels)]

        def plain(logits: torch.Tensor, labels: torch.Tensor = labels) -> list[torch.Tensor]:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            return [F.cross_entropy(wide, labels, reduction="none")]

        logits = torch.randn(tokens, entries, device=device, dtype=torch.bfloat16).requires_grad_()
        grads = [torch.randn(tokens, device=device)]
        found |= _beside(f"cross-entropy of {entries}", ours, plain, [logits], grads, device)
    return found


def updates(device: str) -> dict[str, float]:
    """Return times of what our kernels over many tensors do and of torch's operations, and where their bits differ.

    Factor 1 and share 0 touch nothing: these times are a launch's, and a copy of the addresses."""
    from megatron_ext.device.many_tensors import copy_
    from megatron_ext.device.triton import many_tensors

    matrices, vectors, shape = WEIGHTS[device]
    tensors = [torch.randn(shape, device=device) for _ in range(matrices)]
    tensors += [torch.randn(shape[1], device=device) for _ in range(vectors)]
    ends = [torch.randn_like(one) for one in tensors]

    def lerp_each(share: torch.Tensor) -> None:
        for one, end in zip(tensors, ends, strict=True):
            one.lerp_(end, share)

    operations: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], tuple[float, ...]]] = {
        "scale": (
            lambda factor: many_tensors.scale_(tensors, factor),
            lambda factor: torch._foreach_mul_(tensors, factor),  # pyright: ignore[reportPrivateImportUsage]
            (0.7, 1.0),
        ),
        "average": (lambda share: many_tensors.lerp_(tensors, ends, share), lerp_each, (1e-3, 0.0)),
    }
    found: dict[str, float] = {}
    for name, (ours, plain, numbers) in operations.items():
        for number in numbers:
            on_device = torch.tensor(number, device=device)
            before = [one.clone() for one in tensors]
            plain(on_device)
            expected = [one.clone() for one in tensors]
            copy_(tensors, before)
            ours(on_device)
            pairs = zip(tensors, expected, strict=True)
            apart = max(_error(got, known) for got, known in pairs)
            others = sum(int((got != known).sum()) for got, known in zip(tensors, expected, strict=True))
            found |= {f"error, {name} by {number:g}": apart, f"other bits, {name} by {number:g}": float(others)}
            found[f"ms, {name} by {number:g}"] = _milliseconds(lambda ours=ours, on=on_device: ours(on), device)
            found[f"ms, plain, {name} by {number:g}"] = _milliseconds(
                lambda plain=plain, on=on_device: plain(on), device
            )
    return found


def ceilings(device: str) -> dict[str, float]:
    """Return what large products and copies reach here."""
    from benchmarks.train_step import measured_ceilings

    return measured_ceilings(device)


def _beside(
    name: str,
    ours: Callable[..., list[torch.Tensor]],
    plain: Callable[..., list[torch.Tensor]],
    inputs: list[torch.Tensor],
    grads: list[torch.Tensor],
    device: str,
) -> dict[str, float]:
    """Return the largest error of results and gradients against float64, of ours and of plain's, and the times of both,
    forward and backward."""
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact_out = plain(*wide)
    exact = [*exact_out, *torch.autograd.grad(exact_out, wide, [grad.double() for grad in grads])]
    found: dict[str, float] = {}
    for kind, function in (("", ours), (", plain", plain)):

        def both(function: Callable[..., list[torch.Tensor]] = function) -> list[torch.Tensor]:
            out = function(*inputs)
            return [*out, *torch.autograd.grad(out, inputs, grads)]

        error = max(_error(got.detach(), known.detach()) for got, known in zip(both(), exact, strict=True))
        # 16-bit results are off by rounding alone; what is asked of them is to be no worse than torch's.
        found[f"off{kind}, {name}"] = error
        found[f"ms{kind}, {name}"] = _milliseconds(both, device)
    found[f"error beyond torch's, {name}"] = max(0.0, found[f"off, {name}"] - found[f"off, plain, {name}"])
    return found


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def _milliseconds(call: Callable[[], Any], device: str) -> float:
    return median_milliseconds(call, gpu_clock if device == "cuda" else cpu_clock)


Clock = Callable[[Callable[[], Any], int], float]
"""Returns the milliseconds of so many calls, one after the other."""


def median_milliseconds(call: Callable[[], Any], clock: Clock) -> float:
    """Return the median time of a call, after three that warm up.

    What takes less than 50 microseconds is timed by 20 calls between two readings: by itself it would take as long as
    the host needs to launch it and to read the clock.
    """
    for calls in (1, CALLS_OF_A_SHORT_ONE):
        times = [clock(call, calls) / calls for _ in range(13)]
        median = statistics.median(times[3:])
        if median >= SHORT:
            break
    return round(median, 5)


def gpu_clock(call: Callable[[], Any], calls: int) -> float:
    """Read two events of the GPU's stream, which is idle before the first."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def cpu_clock(call: Callable[[], Any], calls: int) -> float:
    """Read the wall clock."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return 1000.0 * (time.perf_counter() - began)


def _peak(call: Callable[[], Any], device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main(*sys.argv[1:])
