#!/usr/bin/env python3
"""Measures attention with a window on a CPU next to attention over all keys: forward and backward pass of one layer.

    python benchmarks/window_attention.py --output benchmarks/results    # a minute

Time is the smallest of some calls in turns, in seconds of one thread. Memory is what a process of its own needs more
than before its only call.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence, tell

LENGTHS, WINDOW, HEADS, CHANNELS = (1024, 2048, 4096, 8192), 512, 4, 64


def calls(length: int) -> dict[str, Callable[[], None]]:
    """Return a forward and a backward pass over all keys, and with the window."""
    import torch
    import torch.nn.functional as F

    from megatron_ext.parts.attention.segments import attend_window

    torch.set_num_threads(1)
    query, key, value = (torch.randn(1, HEADS, length, CHANNELS, requires_grad=True) for _ in range(3))
    return {
        "all keys": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward(),
        "window": lambda: attend_window(query, key, value, CHANNELS**-0.5, WINDOW).sum().backward(),
    }


def seconds(length: int, rounds: int) -> dict[str, float]:
    """Return the smallest seconds of each kind."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, call in calls(length).items():
            began = time.thread_time()
            call()
            found[name] = min(found.get(name, float("inf")), time.thread_time() - began)
    return found


def _peak(pipe: Any, length: int, name: str) -> None:
    call = calls(length)[name]
    calls(64)[name]()  # what the first call of a process needs whatever the length
    before = _most_kib()
    call()
    pipe.send((_most_kib() - before) / 1024.0)


def _most_kib() -> int:
    """Return the most memory that this process had, in KiB; getrusage would count its parent's before the exec."""
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def peak_mib(length: int, name: str) -> float:
    """Return the MiB that one call needs, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_peak, args=(there, length, name))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="calls of each kind")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()
    record: dict[str, Any] = heading()
    record["rows"] = [
        {"length": length}
        | {f"{name}, s": value for name, value in seconds(length, given.rounds).items()}
        | {f"{name}, MiB": peak_mib(length, name) for name in ("all keys", "window")}
        for length in LENGTHS
    ]
    lines = [
        f"# Attention with a window of {WINDOW}, {record['date']}",
        "",
        f"{sentence(record)} `python benchmarks/window_attention.py`: {HEADS} heads of {CHANNELS} channels, fp32.",
        "",
        "| positions | all keys, ms | window, ms | window / all | all keys, MiB | window, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        whole, some = row["all keys, s"], row["window, s"]
        lines.append(
            f"| {row['length']:,} | {1e3 * whole:.1f} | {1e3 * some:.1f} | {some / whole:.2f} | "
            f"{row['all keys, MiB']:.0f} | {row['window, MiB']:.0f} |"
        )
    text = "\n".join(lines) + "\n"
    tell(given.output, "window_attention", record, text)


if __name__ == "__main__":
    main()
