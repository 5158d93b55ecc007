#!/usr/bin/env python3
"""Measures each operation of ours beside its plain reference on a CPU: error, peak of memory, processor time.

    python benchmarks/operations.py --output benchmarks/results

Error: the norm of the difference to the same in float64 over the norm of that, of the result and of all gradients, at
--small tokens. Bytes: how far the peak of the process's resident memory rises in one call, in a process of its own,
gradients included. Time: processor seconds of one thread,
since a machine may have other work; the two take turns, and the ratio is the median of neighbouring turns.

To add an operation, append to `benchmarks/operation_pairs.py`.
"""

import argparse
import multiprocessing
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, keep, sentence


def error(pair: str, which: str, tokens: int) -> float:
    """Return the relative error of a result and its gradients."""
    from benchmarks.operation_pairs import PAIRS

    made, exact = PAIRS[pair].call(which, tokens)(), PAIRS[pair].call("float64", tokens)()
    return max(float((got.double() - right).norm() / right.norm()) for got, right in zip(made, exact, strict=True))


def peak_bytes(pair: str, which: str, tokens: int) -> int:
    """Return how far the resident memory of this process rises at most in one call."""
    from benchmarks.operation_pairs import PAIRS

    PAIRS[pair].call(which, 16)()  # what is loaded or made at the first call
    call = PAIRS[pair].call(which, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def cpu_seconds(pair: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of each contestant's turns."""
    from benchmarks.operation_pairs import PAIRS

    names = PAIRS[pair].names()
    calls = {which: PAIRS[pair].call(which, tokens) for which in names}
    seconds: dict[str, list[float]] = {which: [] for which in names}
    for _ in range(rounds):
        for which, call in calls.items():
            began = time.process_time()
            call()
            seconds[which].append(time.process_time() - began)
    return seconds


def alone(function: Any, *arguments: Any) -> Any:
    """Call a function in a new process with one thread."""
    with multiprocessing.get_context("spawn").Pool(1, initializer=_prepare) as pool:
        return pool.apply(function, arguments)


def _prepare() -> None:
    import torch

    from megatron_ext import device

    torch.set_num_threads(1)
    device.install("cpu")


def measure(pair: str, tokens: int, small: int, rounds: int) -> dict[str, Any]:
    """Return all figures of one operation."""
    names = alone(_names, pair)
    seconds = alone(cpu_seconds, pair, tokens, rounds)
    return {
        which: {
            "error": alone(error, pair, which, small),
            "peak_bytes": alone(peak_bytes, pair, which, tokens),
            "cpu_seconds": statistics.median(seconds[which]),
            "ratio": statistics.median(
                own / other for own, other in zip(seconds[which], seconds["plain"], strict=True)
            ),
        }
        for which in names
    }


def _names(pair: str) -> list[str]:
    from benchmarks.operation_pairs import PAIRS

    return PAIRS[pair].names()


def _pairs() -> list[str]:
    from benchmarks.operation_pairs import PAIRS

    return list(PAIRS)


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    busy = " Beside other work." if record["machine"]["load_average"] > 1 else ""
    lines = [
        f"# Operations beside their plain references, {record['date']}",
        "",
        f"{sentence(record)} torch {record['torch']}, one thread; {record['rounds']} turns of "
        f"{record['tokens']} tokens, errors at {record['small']}.{busy}",
        "",
        "| operation | | error against float64 | peak, MB | over plain | processor s | over plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair, found in record["results"].items():
        for which, row in found.items():
            bytes_ratio = row["peak_bytes"] / found["plain"]["peak_bytes"]
            lines.append(
                f"| {pair} | {which} | {row['error']:.1e} | {row['peak_bytes'] / 1e6:.0f} | {bytes_ratio:.3f} | "
                f"{row['cpu_seconds']:.3f} | {row['ratio']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--small", type=int, default=512, help="tokens of the comparison with float64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="pattern of the names of operations")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    options = parser.parse_args()
    record: dict[str, Any] = heading() | {"torch": torch.__version__, "results": {}}
    record |= {"tokens": options.tokens, "small": options.small, "rounds": options.rounds}
    for pair in alone(_pairs):
        if re.search(options.only, pair):
            record["results"][pair] = measure(pair, options.tokens, options.small, options.rounds)
            print(pair, record["results"][pair], flush=True)
            if options.output is not None:
                keep(options.output, "operations", record, report(record))
    print(report(record))


if __name__ == "__main__":
    main()
