#!/usr/bin/env python3
"""Measures how long the program takes to answer: --help, --dry-run, and the first step of the quickstart's model.

    python benchmarks/startup.py --output benchmarks/results
    python benchmarks/startup.py --ranks 1 8 --repeats 5 --before ../another/checkout    # with the ratio to it

Each command is a process of its own. Seconds are those from its launch to its end, of a training run to the line of the
first step; processor seconds those of the process and all its children up to its end. What Python, torch and
megatron-core take of them is measured by processes that only import them. Figures are medians; the commands take
turns, so that whatever else the machine does hits all of them. The first round is not counted: it fills the disk cache,
and Python's bytecode is written, whatever PYTHONDONTWRITEBYTECODE says.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import ROOT, heading, sentence, tell

# examples/quickstart.sh, but for its data: these are made up, so that nothing must be prepared.
MODEL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "128",
    "--num-attention-heads",
    "4",
    "--group-query-attention",
    "--num-query-groups",
    "2",
    "--swiglu",
    "--ffn-hidden-size",
    "352",
    "--normalization",
    "RMSNorm",
    "--disable-bias-linear",
    "--position-embedding-type",
    "rope",
    "--seq-length",
    "256",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
    "--global-batch-size",
    "8",
    "--train-iters",
    "2",
    "--eval-interval",
    "0",
    "--lr",
    "6e-3",
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "1024",
    "--device",
    "cpu",
    "--log-interval",
    "1",
]
LAYOUTS = {
    1: ("--micro-batch-size", "8"),
    2: ("--micro-batch-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    8: (
        *("--micro-batch-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
}
FIRST_STEP = "iteration        1/"
TARGETS = {"--help": 0.3, "first step": 20.0}
"""Seconds on two cores with nothing else to do."""


@dataclass(frozen=True)
class Command:
    """A process.

    Attributes:
        until: what its output says when the time is taken; None for its end.
    """

    name: str
    arguments: tuple[str, ...]
    until: str | None = None
    target: float | None = None


def commands(ranks: Sequence[int]) -> list[Command]:
    """Return what is measured, for these numbers of ranks."""
    program = ("pretrain_gpt.py",)
    found = [
        Command("python", ("-c", "pass")),
        Command("import torch", ("-c", "import torch")),
        Command(
            "import megatron.core's model",
            ("-c", "from megatron_ext import device; device.install('cpu'); import megatron_ext.model.gpt"),
        ),
        Command("--help", (*program, "--help"), target=TARGETS["--help"]),
        Command("--dry-run", (*program, *MODEL, *LAYOUTS[1], "--dry-run")),
    ]
    for number in ranks:
        launcher = () if number == 1 else ("-m", "torch.distributed.run", "--nproc-per-node", str(number))
        plural = "es" if number > 1 else ""
        found.append(
            Command(
                f"first step, {number} process{plural}",
                (*launcher, *program, *MODEL, *LAYOUTS[number]),
                FIRST_STEP,
                TARGETS["first step"],
            )
        )
    return found


def measured(command: Command, root: Path = ROOT) -> tuple[float, float]:
    """Return seconds until the time is taken, and processor seconds until the end, in a checkout."""
    before = _processor_seconds()
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPATH"] = str(root)  # of several checkouts one may be installed
    process = subprocess.Popen(
        [sys.executable, *command.arguments], cwd=root, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    seconds = None
    said = []
    for line in process.stdout:
        said.append(line)
        if seconds is None and command.until is not None and command.until in line:
            seconds = time.perf_counter() - began
    code = process.wait()
    if code != 0 or (command.until is not None and seconds is None):
        sys.exit(f"{command.name}: exit code {code}, or no line with {command.until!r}:\n{''.join(said[-20:])}")
    return seconds or time.perf_counter() - began, _processor_seconds() - before


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(ranks: Sequence[int], repeats: int, before: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the medians of every command, and of each in another checkout, with the ratio to that."""
    chosen, roots = commands(ranks), [ROOT] if before is None else [ROOT, before]
    times: dict[tuple[str, Path], list[tuple[float, float]]] = {
        (one.name, root): [] for one in chosen for root in roots
    }
    for turn in range(repeats + 1):
        for command in chosen:
            for root in roots if turn % 2 else roots[::-1]:
                found = measured(command, root)
                if turn:
                    times[command.name, root].append(found)
                print(turn, command.name, root.name, *(f"{value:.2f}" for value in found), flush=True)
    results: dict[str, dict[str, Any]] = {}
    for command in chosen:
        results[command.name] = row = _medians(times[command.name, ROOT]) | {"target": command.target}
        if before is not None:
            row["before"] = other = _medians(times[command.name, before])
            row["ratio"] = {name: row[name] / other[name] for name in other}
    return results


def _medians(found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "seconds": statistics.median(seconds for seconds, _ in found),
        "processor_seconds": statistics.median(used for _, used in found),
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    compared = any("before" in row for row in record["results"].values())
    busy = " Beside other work: the processor seconds count." if record["machine"]["load_average"] > 1 else ""
    lines = [
        f"# From launch to the first answer, {record['date']}",
        "",
        f"{sentence(record)} Medians of {record['repeats']}.{busy}",
        "",
        "| | seconds | processor seconds | to reach, s |" + " before | ratio |" * compared,
        "|---|---|---|---|" + "---|---|" * compared,
    ]
    for name, row in record["results"].items():
        target = "" if row["target"] is None else f"{row['target']:g}"
        line = f"| {name} | {row['seconds']:.2f} | {row['processor_seconds']:.2f} | {target} |"
        if compared:
            before, ratio = row["before"], row["ratio"]
            line += f" {before['seconds']:.2f}, {before['processor_seconds']:.2f} |"
            line += f" {ratio['seconds']:.2f}, {ratio['processor_seconds']:.2f} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", choices=tuple(LAYOUTS), default=[1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with another checkout, in turns")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    options = parser.parse_args()
    record: dict[str, Any] = heading() | {"repeats": options.repeats}
    record["results"] = measure(options.ranks, options.repeats, options.before and options.before.resolve())
    tell(options.output, "startup", record, report(record))


if __name__ == "__main__":
    main()
