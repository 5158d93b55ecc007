#!/usr/bin/env python3
"""Measures how far products in eight and four bits take the loss of small models of code from bf16's, on a CPU.

    python benchmarks/low_precision_learning.py --size 1M --shape dense --seeds 5 --output benchmarks/results
    python benchmarks/low_precision_learning.py --size 4M --shape experts --only mxfp8 --output benchmarks/results

The text is the repository's own Python files, byte by byte in the order of their names; the last tenth is for
validation. Runs of one seed have the same weights, samples and flags, but for those of their precision. A gap is the
mean loss of the last tenth of the steps less bf16's with the same seed, in nats per byte; the interval of 95% is
Student's over the seeds. On a CPU the numbers that are multiplied are those of a GPU, and sums are in fp32.

A measurement is made in slices, over as many calls and days as it takes: each call goes on with the newest file in the
output folder and adds the runs that it lacks, seeds in the outer loop. After every run, and with --seeds 0 at once, it
writes table and picture of all that the file has. The text is that of the commit that the first call began with, and
so is the number of steps.
"""

import io
import json
import re
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fp8_loss import FIRST_SEED, write_text
from benchmarks.recording import heading, keep, sentence
from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.pages.markup import Markup, element, svg_file

ROOT = Path(__file__).resolve().parent.parent

COMMON = shlex.split("""
    --num-attention-heads 4 --seq-length 128 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --lr-decay-style cosine --lr 2e-3 --min-lr 2e-4 --lr-warmup-fraction 0.05 --adam-beta2 0.99 --weight-decay 0.1
    --clip-grad 1.0 --micro-batch-size 4 --global-batch-size 16 --tokenizer-type ByteTokenizer --eval-interval 100000
    --eval-iters 20 --bf16
""")
_EIGHT = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-aux-loss-coeff 0.01"
SHAPES = {
    ("1M", "dense"): "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384",
    ("1M", "experts"): f"--num-layers 2 --hidden-size 128 --ffn-hidden-size 384 {_EIGHT}",
    ("4M", "dense"): "--num-layers 4 --hidden-size 256 --ffn-hidden-size 768",
    ("4M", "experts"): f"--num-layers 4 --hidden-size 256 --ffn-hidden-size 768 {_EIGHT}",
}
"""Flags of a model by its parameters, about, and the kind of its MLPs; all sides are multiples of 128."""

_HYBRID = "--fp8-format hybrid --fp8-recipe"
RUNS = {
    "bf16": "",
    "tensorwise": f"{_HYBRID} tensorwise",
    "rowwise": f"{_HYBRID} rowwise",
    "blockwise": f"{_HYBRID} blockwise",
    **{f"mxfp8, {format_}": f"--fp8-format {format_} --fp8-recipe mxfp8" for format_ in ("e4m3", "hybrid")},
    **{name: f"--fp4-format e2m1 --fp4-recipe {name}" for name in ("nvfp4", "mxfp4")},
    "nvfp4, last layer in bf16": (
        "--fp4-format e2m1 --fp4-recipe nvfp4 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0"
    ),
}
NAME = "low_precision_learning"
DAY = 86_400.0
"""Seconds after which a run is given up: a slow processor takes hours."""

STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Two-sided 95% points of Student's t by the number of seeds."""

Losses = dict[str, dict[str, float]]
"""Name of a run -> seed -> loss of the last steps."""


def corpus(commit: str) -> bytes:
    """Return the Python files of a commit, one after another."""
    command = ["git", "archive", "--format=tar", commit]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = sorted((one for one in files if one.isfile() and one.name.endswith(".py")), key=lambda one: one.name)
        return b"".join(file.read() for one in members if (file := files.extractfile(one)) is not None)


def begun(folder: Path | None, steps: int) -> dict[str, Any]:
    """Return the newest record of a folder; one without runs where there is none.

    Raises:
        ConfigurationError: the record has runs of another number of steps.
    """
    records = sorted(folder.glob(f"{NAME}-*.json")) if folder is not None else []
    if not records:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        return {**heading(), "text": git.stdout.strip(), "steps": steps, "models": {}}
    found = json.loads(records[-1].read_text())
    if found["steps"] != steps:
        raise ConfigurationError(
            f"--steps {steps}: the runs of {records[-1]} have {found['steps']}; use --steps {found['steps']}, or "
            "another folder as --output"
        )
    return found


def write(folder: Path | None, found: dict[str, Any]) -> None:
    """Write record, table and picture, where there is a folder for them."""
    if folder is not None:
        keep(folder, NAME, found, page(found))
        (folder / f"{NAME}-{found['date']}.svg").write_text(picture(found["models"]))


def gap(runs: Losses, name: str) -> tuple[float, float, int]:
    """Return the mean gap to bf16, half of its interval of 95% (NaN for one seed), and the number of seeds."""
    found = [loss - runs["bf16"][seed] for seed, loss in runs[name].items() if seed in runs["bf16"]]
    if len(found) < 2:
        return found[0] if found else float("nan"), float("nan"), len(found)
    error = statistics.stdev(found) / len(found) ** 0.5
    return statistics.fmean(found), STUDENT.get(len(found), 1.96) * error, len(found)


def page(found: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    rows = []
    for model, runs in found["models"].items():
        for name in runs:
            mean, half, seeds = gap(runs, name)
            loss = statistics.fmean(runs[name].values())
            rows.append(f"| {model} | {name} | {seeds} | {loss:.4f} | {mean:+.4f} ± {half:.4f} |")
    return "\n".join(
        [
            f"# Loss of code in eight and four bits, {found['date']}",
            "",
            f"{sentence(found)} {found['steps']} steps of 16 x 128 bytes of the repository's Python files; the loss is "
            "the mean of the last tenth of the steps, in nats per byte. A gap is to bf16 with the same seed, with its "
            "interval of 95%. `benchmarks/low_precision_learning.py`.",
            "",
            "| model | run | seeds | loss | gap |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def picture(models: dict[str, Losses]) -> str:
    """Return an SVG of the gaps with their intervals, a row for each model and run."""
    rows = [(f"{model}: {name}", *gap(runs, name)[:2]) for model, runs in models.items() for name in runs]
    rows = [(name, mean, 0.0 if half != half else half) for name, mean, half in rows if mean == mean]
    largest = max((abs(mean) + half for _, mean, half in rows), default=0.0) or 1.0

    def x(value: float) -> float:
        return 420 + 180 * value / largest

    drawn = [_line(x(0), 10, x(0), 20 * len(rows) + 14, "#888")]
    for row, (name, mean, half) in enumerate(rows):
        y = 20 * row + 20
        drawn += [
            element("text", name, x=8, y=y + 4),
            _line(x(mean - half), y, x(mean + half), y, "#000"),
            element("circle", cx=f"{x(mean):.1f}", cy=y, r=3),
            element("text", f"{mean:+.3f}", x=610, y=y + 4),
        ]
    style = "text { font: 12px sans-serif }"
    return str(svg_file("Gap to bf16 in nats per byte", style, 680, 20 * len(rows) + 24, *drawn))


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> Markup:
    return element("line", x1=f"{x1:.1f}", y1=y1, x2=f"{x2:.1f}", y2=y2, stroke=colour)


def measured(words: Sequence[str], steps: int) -> float:
    """Train once; return the mean loss of the last tenth of the steps."""
    from megatron_ext.plugins.prove.recorded_training import record

    run = record([*words, "--train-iters", str(steps)], 1, steps, timeout=DAY)
    return float(np.mean(run.losses[-max(steps // 10, 1) :]))


def main(argv: list[str]) -> int:
    parser = ToolParser("Measure how far products in eight and four bits take the loss from bf16's.")
    parser.add_argument("--size", choices=("1M", "4M"), default="1M", help="parameters")
    parser.add_argument("--shape", choices=("dense", "experts"), default="dense")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each precision; 0 draws alone")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", default="", help="pattern of the names of runs; bf16 is always run")
    parser.add_argument("--output", type=Path, help="folder for the results; without it they are printed alone")
    args = parser.parse_args(argv)
    found = begun(args.output, args.steps)
    runs: Losses = found["models"].setdefault(f"{args.size} {args.shape}", {})
    chosen = {name: flags for name, flags in RUNS.items() if name == "bf16" or re.search(args.only, name)}
    with tempfile.TemporaryDirectory() as folder:
        data = write_text(corpus(found["text"]), Path(folder))
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
            for name, flags in chosen.items():
                if str(seed) in runs.get(name, {}):
                    continue
                model = SHAPES[args.size, args.shape].split()
                words = [*COMMON, *model, *data, *flags.split(), "--seed", str(seed)]
                runs.setdefault(name, {})[str(seed)] = measured(words, args.steps)
                print(seed, name, runs[name][str(seed)], flush=True)
                write(args.output, found)
    write(args.output, found)
    print(page(found))
    return 0


if __name__ == "__main__":
    run_tool(main)
