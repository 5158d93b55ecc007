#!/usr/bin/env python3
"""Measures a training step against what the machine can do: how much of its products and copies is reached, and where
the rest goes.

    python benchmarks/train_step.py --output benchmarks/results            # a CPU, one thread, a small model
    python benchmarks/train_step.py --device cuda --size 1.3b              # a GPU, bf16
    python benchmarks/train_step.py --contestants                          # and in turns with the peers of cpu_speed.py

Ceilings: the best of several large matrix products, and of copies between two large buffers, measured right before and
right after the steps; the larger of both counts. Reached: model FLOPs (`cost/flops.py`, attention "causal") of a step
over its seconds, over the ceiling of products. The profile divides the time of the operators themselves (on a GPU that
of the kernels) into products, attention, the optimizer where it is fused, and what else passes over memory; what no
operator covers is Python, launches and waiting. On a CPU processor seconds stand in for seconds, since a machine may
have other work, but not in the profile. With --contestants the peers follow in turns, by `benchmarks/cpu_speed.py` on a
CPU; for those on a GPU see `benchmarks/gpu_session.py --phase peers`.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import ROOT, heading, sentence, tell
from benchmarks.timed_steps import timed_steps

LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--attention-dropout 0 --log-interval 100 "
)
SIZES = {
    "small": LLAMA
    + "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 352 --seq-length 64 --vocab-size 257 "
    "--micro-batch-size 12 --global-batch-size 12",
    "medium": LLAMA
    + "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --ffn-hidden-size 1024 --seq-length 256 "
    "--vocab-size 257 --micro-batch-size 8 --global-batch-size 8",
    "124m": LLAMA + "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 2048 "
    "--seq-length 1024 --vocab-size 50257 --micro-batch-size 32 --global-batch-size 64 --bf16",
    "1.3b": LLAMA + "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5504 "
    "--seq-length 2048 --vocab-size 32000 --untie-embeddings-and-output-weights --micro-batch-size 4 "
    "--global-batch-size 16 --bf16",
}
KINDS = {
    "products": ("mm", "linear", "gemm", "matmul", "nvjet", "cutlass_80_w", "wgmma", "addmm", "bmm", "baddbmm"),
    "attention": ("attention", "flash", "fmha", "sdpa"),
    "fused optimizer": ("adam", "foreach", "multi_tensor", "vector_norm"),
}
"""Words in the names of operators and kernels, asked in the order attention, optimizer, products; the rest passes over
memory."""


def measured_ceilings(device: str) -> dict[str, float]:
    """Return the best rates of large products (FLOP/s) and of copies (bytes/s, read and written)."""
    import torch

    if device == "cuda":
        shapes, dtype, numbers = ((8192, 8192, 8192), (8192, 2048, 8192), (16384, 4096, 4096)), torch.bfloat16, 1 << 30
    else:
        shapes, dtype, numbers = ((1024, 1024, 1024), (768, 128, 704), (2048, 384, 1024)), torch.float32, 1 << 24
    found = {}
    for rows, summed, columns in shapes:
        x, weight = (torch.randn(size, device=device, dtype=dtype) for size in ((rows, summed), (columns, summed)))
        rate = 2.0 * rows * summed * columns / _best_seconds(_product(x, weight, device), device)
        found[f"products of {rows} x {summed} x {columns}, TFLOP/s"] = rate / 1e12
    source = torch.ones(numbers, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    found["copies, GB/s"] = 8.0 * numbers / _best_seconds(lambda: target.copy_(source), device) / 1e9
    return found


def _product(x: Any, weight: Any, device: str) -> Callable[[], Any]:
    """Return the product as the program computes it: on a CPU by oneDNN."""
    import torch

    from megatron_ext.device.kernels import linear

    def product() -> Any:
        with torch.no_grad():
            return x @ weight.t() if device == "cuda" else linear(x, weight)

    return product


def _best_seconds(call: Callable[[], Any], device: str) -> float:
    """Return the shortest of several calls: processor seconds on a CPU, where a call of a busy machine waits."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.process_time
    seconds = []
    for _ in range(12):
        wait()
        began = clock()
        call()
        wait()
        seconds.append(clock() - began)
    return min(seconds[2:])


def kind_of(name: str) -> str:
    """Return what an operator or kernel is counted as."""
    lowered = name.lower()
    for kind in ("attention", "fused optimizer", "products"):
        if any(word in lowered for word in KINDS[kind]):
            return kind
    return "passes over memory"


def shares(events: Iterable[tuple[str, float]], total: float) -> dict[str, float]:
    """Return the share of each kind in the seconds of all steps, and of what no operator covers.

    Args:
        events: names of operators, and seconds of each itself.
        total: seconds of the steps.
    """
    seconds: dict[str, float] = {}
    for name, own in events:
        seconds[kind_of(name)] = seconds.get(kind_of(name), 0.0) + own
    found = {kind: seconds[kind] / total for kind in sorted(seconds, key=seconds.__getitem__, reverse=True)}
    return found | {"no operator": 1.0 - sum(found.values())}


def profiled(flags: list[str], device: str, warmup: int, steps: int) -> dict[str, float]:
    """Return the shares of the kinds, from a run of its own: watching costs time."""
    import torch

    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU])
    found = timed_steps(flags, warmup, steps, profiler)
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = [(event.key, getattr(event, own) / 1e6) for event in profiler.key_averages()]
    # Ranges that are no operators, with what Python does inside of them.
    operators = [(name, seconds) for name, seconds in events if device == "cuda" or "::" in name]
    return shares(operators, sum(found["seconds"]))


def measure(device: str, size: str, warmup: int, steps: int) -> dict[str, Any]:
    """Return ceilings, the step, and its profile."""
    flags = ["--device", device, *SIZES[size].split()]
    before = measured_ceilings(device)
    found = timed_steps(flags, warmup, steps)
    after = measured_ceilings(device)
    best = {name: max(before[name], after[name]) for name in before}
    seconds = statistics.median(found["seconds" if device == "cuda" else "processor_seconds"])
    flops = found["flops_per_token"] * found["tokens"]
    ceiling = max(rate for name, rate in best.items() if name.startswith("products"))
    return {
        "ceilings": best,
        "seconds": seconds,
        "tokens": found["tokens"],
        "model_flops": flops,
        "tflops": flops / seconds / 1e12,
        "reached": flops / seconds / 1e12 / ceiling,
        "shares": profiled(flags, device, warmup, max(2, steps // 4)),
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    found, on_gpu = record["result"], record["device"] == "cuda"
    busy = " Beside other work." if record["machine"]["load_average"] > 1 else ""
    unit = "seconds" if on_gpu else "processor seconds of one thread"
    lines = [
        f"# A training step against the machine, {record['size']}, {record['date']}",
        "",
        f"{sentence(record)} On {record['device']}; {unit}.{busy}",
        "",
        f"A step of {found['tokens']:,} tokens takes {1000 * found['seconds']:.1f} ms: "
        f"{found['tokens'] / found['seconds']:,.0f} tokens/s, {found['tflops']:.4g} TFLOP/s of the model's own "
        f'products (attention "causal"), **{found["reached"]:.0%} of the best product** measured in the same run.',
        "",
        "| ceiling | |",
        "|---|---|",
        *(f"| {name} | {rate:.4g} |" for name, rate in found["ceilings"].items()),
        "",
        "| where the time goes | share |",
        "|---|---|",
        *(f"| {kind} | {share:.0%} |" for kind, share in found["shares"].items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--contestants", action="store_true", help="run benchmarks/cpu_speed.py, too")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    options = parser.parse_args()
    import torch

    if options.device == "cpu":
        torch.set_num_threads(1)
    from megatron_ext import device

    device.install(options.device, own_kernels=True)
    record: dict[str, Any] = heading() | {"device": options.device, "size": options.size}
    record["result"] = measure(options.device, options.size, options.warmup, options.steps)
    tell(options.output, f"train_step-{options.device}-{options.size}", record, report(record))
    if options.contestants:
        assert options.device == "cpu", "on a GPU: benchmarks/gpu_session.py --phase peers"
        output = ["--output", str(options.output)] if options.output is not None else []
        subprocess.run([sys.executable, str(ROOT / "benchmarks/cpu_speed.py"), *output], check=True)


if __name__ == "__main__":
    main()
