#!/usr/bin/env python3
"""Measures how the cost of a step grows with layers, width, sequence, microbatches and ranks, and fits an exponent.

    python benchmarks/scaling.py --output benchmarks/results
    python benchmarks/scaling.py --only width --rounds 5

One size grows, the others stay. The cost is processor seconds of a step of one rank, with one thread each: of ranks the
largest, and each has microbatches of its own. Sizes take turns within a round; a figure is the median over the rounds
of the round's medians. The exponent is the slope of log(cost) over log(size) by least squares: of all sizes, and
between the two largest, where what does not grow weighs least. Beside it stands the exponent of the model's FLOPs.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, keep, sentence
from benchmarks.timed_steps import timed_steps

BASE = {"layers": 2, "width": 128, "sequence": 128, "microbatches": 1, "ranks": 1}
SIZES: dict[str, tuple[int, ...]] = {
    "layers": (1, 2, 4, 8),
    "width": (64, 128, 256, 512),
    "sequence": (64, 128, 256, 512),
    "microbatches": (1, 2, 4, 8),
    "ranks": (1, 2, 4),
}
MICRO_BATCH, VOCABULARY = 2, 512
WARMUP, STEPS = 2, 4


def flags_of(sizes: dict[str, int]) -> list[str]:
    """Return the flags of a Llama-shaped model of these sizes."""
    batch = MICRO_BATCH * sizes["microbatches"] * sizes["ranks"]
    return (
        f"--device cpu --num-layers {sizes['layers']} --hidden-size {sizes['width']} --num-attention-heads 4 "
        f"--ffn-hidden-size {8 * sizes['width'] // 3} --seq-length {sizes['sequence']} --vocab-size {VOCABULARY} "
        f"--micro-batch-size {MICRO_BATCH} --global-batch-size {batch} --log-interval 100 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
        "--attention-dropout 0"
    ).split()


def cost(sizes: dict[str, int]) -> tuple[float, float]:
    """Return processor seconds of a step, and the FLOPs of its tokens on one rank."""
    if sizes["ranks"] > 1:
        from megatron_ext.verify.ranks import run_ranks

        found = run_ranks(sizes["ranks"], timed_steps, flags_of(sizes), WARMUP, STEPS)
    else:
        found = [timed_steps(flags_of(sizes), WARMUP, STEPS)]
    used = max(statistics.median(rank["processor_seconds"]) for rank in found)
    return used, found[0]["flops_per_token"] * found[0]["tokens"] / sizes["ranks"]


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the exponent p of cost = c size^p that fits best, by least squares of the logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    x, y = statistics.mean(xs), statistics.mean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def measure(what: str, rounds: int) -> dict[str, Any]:
    """Return costs and exponents for one size that grows."""
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES[what]}
    for _ in range(rounds):
        for size, costs in found.items():
            costs.append(_in_a_process({**BASE, what: size}))
    sizes = list(found)
    seconds = [statistics.median(used for used, _ in costs) for costs in found.values()]
    flops = [costs[0][1] for costs in found.values()]
    return {
        "sizes": sizes,
        "processor_seconds": seconds,
        "flops": flops,
        "exponent": slope(sizes, seconds),
        "exponent_of_the_largest": slope(sizes[-2:], seconds[-2:]),
        "exponent_of_flops": slope(sizes, flops),
    }


def _in_a_process(sizes: dict[str, int]) -> tuple[float, float]:
    """Call `cost` in a process that serves all sizes of one rank, so that what is imported is imported once."""
    global _pool
    if sizes["ranks"] > 1:  # which are processes of their own
        return cost(sizes)
    if _pool is None:
        _pool = multiprocessing.get_context("spawn").Pool(1, initializer=_one_thread)
    return _pool.apply(cost, (sizes,))


_pool: Any = None


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    busy = " Beside other work." if record["machine"]["load_average"] > 1 else ""
    lines = [
        f"# Cost of a step against its sizes, {record['date']}",
        "",
        f"{sentence(record)} One thread a rank. A Llama-shaped model of "
        f"{BASE['layers']} layers of {BASE['width']}, {MICRO_BATCH} sequences of {BASE['sequence']} in a microbatch, "
        f"one microbatch, one rank, but for what grows; processor seconds of a step, medians of {STEPS} steps and "
        f"{record['rounds']} rounds.{busy}",
        "",
        "| what grows | sizes | processor ms | exponent | of the two largest | of the FLOPs |",
        "|---|---|---|---|---|---|",
    ]
    for what, row in record["results"].items():
        sizes = ", ".join(map(str, row["sizes"]))
        costs = ", ".join(f"{1000 * seconds:.1f}" for seconds in row["processor_seconds"])
        lines.append(
            f"| {what} | {sizes} | {costs} | {row['exponent']:.2f} | {row['exponent_of_the_largest']:.2f} | "
            f"{row['exponent_of_flops']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:

    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    record: dict[str, Any] = heading() | {"rounds": options.rounds}
    record["results"] = {}
    for what in options.only:
        record["results"][what] = measure(what, options.rounds)
        print(what, record["results"][what], flush=True)
        if options.output is not None:
            keep(options.output, "scaling", record, report(record))
    print(report(record))


if __name__ == "__main__":
    main()
