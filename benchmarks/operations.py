#!/usr/bin/env python3
"""Measures each operation of ours beside its plain reference on a CPU: error, peak of memory, processor time.

    python benchmarks/operations.py --output benchmarks/results
    python benchmarks/operations.py --only '^$' --heads 8192x256 8192x512 --chunks 64 128 --output benchmarks/results

--heads measures the output layer with its loss at several sizes (tokens x width), where memory decides and where the
three matrix products do, which both sides have; --chunks takes other numbers of tokens at a time as well. Results with
--heads are kept as operations-heads, for they are of another number of tokens.

Error: the norm of the difference to the same in float64 over the norm of that, of the result and of all gradients, at
--small tokens. Bytes: how far the peak of the process's resident memory rises in one call, in a process of its own,
gradients included. Time: processor seconds of one thread,
since a machine may have other work; the two take turns, and the ratio is the median of neighbouring turns.

To add an operation, append to `benchmarks/operation_pairs.py`.
"""

import argparse
import ctypes
import multiprocessing
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, keep, sentence

Measured = str | tuple[int, tuple[int, ...]]
"""An operation: its name in PAIRS, or of an output layer the width and the chunks."""


def _found(measured: Measured) -> Any:
    from benchmarks.operation_pairs import PAIRS, sized_head

    return PAIRS[measured] if isinstance(measured, str) else sized_head(*measured)


def error(pair: Measured, which: str, tokens: int) -> float:
    """Return the relative error of a result and its gradients."""
    found = _found(pair)
    made, exact = found.call(which, tokens)(), found.call("float64", tokens)()
    return max(float((got.double() - right).norm() / right.norm()) for got, right in zip(made, exact, strict=True))


def peak_bytes(pair: Measured, which: str, tokens: int) -> int:
    """Return how far the resident memory of this process rises at most in one call."""
    _found(pair).call(which, 16)()  # what is loaded or made at the first call
    call = _found(pair).call(which, tokens)
    ctypes.CDLL(None).malloc_trim(0)  # what that call has left is not there already (device/cpu.py)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def cpu_seconds(pair: Measured, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of each contestant's turns."""
    names = _found(pair).names()
    calls = {which: _found(pair).call(which, tokens) for which in names}
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


def measure(pair: Measured, tokens: int, small: int, rounds: int) -> dict[str, Any]:
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


def _names(pair: Measured) -> list[str]:
    return _found(pair).names()


def _least_bytes(tokens: int, width: int, chunks: tuple[int, ...]) -> dict[str, int]:
    """Return the least memory of each fused contestant."""
    from benchmarks.operation_pairs import chunked_name, head_bytes
    from megatron_ext.config.derived.batch_size import LOSS_CHUNKS

    sizes = {"fused": LOSS_CHUNKS["cpu"], **{chunked_name(chunk): chunk for chunk in chunks}}
    return {which: head_bytes(tokens, width, chunk) for which, chunk in sizes.items()}


def _pairs() -> list[str]:
    from benchmarks.operation_pairs import PAIRS

    return list(PAIRS)


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    busy = " Beside other work." if record["machine"]["load_average"] > 1 else ""
    lines = [
        f"# Operations beside their plain references, {record['date']}",
        "",
        f"{sentence(record)} One thread; {record['rounds']} turns of "
        f"{record['tokens']} tokens where a row names no others, errors at {record['small']}.{busy} Peaks of all sides "
        "hold the results, which are the gradients too; what is given (inputs, weights, a main gradient) is there "
        "before.",
    ]
    if record["results"]:
        lines += _table("operation", record["results"])
    if record.get("heads"):
        lines += [
            "",
            "Output layer and loss in fp32. Least: both gradients and one chunk of logits, which the fused side cannot "
            "do without.",
            *_table("tokens x width", record["heads"], least=True),
        ]
    return "\n".join(lines) + "\n"


def _table(first: str, results: dict[str, Any], *, least: bool = False) -> list[str]:
    header = [first, "", "error against float64", "peak, MB", *["least, MB"] * least, "over plain", "processor s"]
    lines = ["", f"| {' | '.join([*header, 'over plain'])} |", "|---" * (len(header) + 1) + "|"]
    for name, found in results.items():
        for which, row in found.items():
            cells = [name, which, f"{row['error']:.1e}", f"{row['peak_bytes'] / 1e6:.0f}"]
            if least:
                cells.append(f"{row['least_bytes'] / 1e6:.0f}" if "least_bytes" in row else "")
            cells.append(f"{row['peak_bytes'] / found['plain']['peak_bytes']:.3f}")
            lines.append(f"| {' | '.join([*cells, f'{row["cpu_seconds"]:.3f}', f'{row["ratio"]:.2f}'])} |")
    return lines


def _size(text: str) -> tuple[int, int]:
    tokens, _, width = text.partition("x")
    return int(tokens), int(width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--small", type=int, default=512, help="tokens of the comparison with float64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="pattern of the names of operations; '^$' for none")
    parser.add_argument(
        "--heads", type=_size, nargs="*", default=[], help="output layers with their loss: TOKENSxWIDTH"
    )
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="of --heads, further tokens at a time")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    options = parser.parse_args()
    record: dict[str, Any] = heading() | {"results": {}, "heads": {}}
    record |= {"tokens": options.tokens, "small": options.small, "rounds": options.rounds}

    def measured() -> None:
        if options.output is not None:
            keep(options.output, "operations-heads" if options.heads else "operations", record, report(record))

    for pair in alone(_pairs):
        if re.search(options.only, pair):
            record["results"][pair] = measure(pair, options.tokens, options.small, options.rounds)
            print(pair, record["results"][pair], flush=True)
            measured()
    chunks = tuple(options.chunks)
    for tokens, width in options.heads:
        rows = measure((width, chunks), tokens, options.small, options.rounds)
        for which, least in alone(_least_bytes, tokens, width, chunks).items():
            rows[which]["least_bytes"] = least
        record["heads"][f"{tokens} x {width}"] = rows
        print(tokens, width, rows, flush=True)
        measured()
    print(report(record))


if __name__ == "__main__":
    main()
