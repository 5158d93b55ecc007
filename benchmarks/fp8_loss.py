#!/usr/bin/env python3
"""Measures how far FP8 takes the loss of a small model from that of bf16, over 500 steps on a CPU.

    python benchmarks/fp8_loss.py tinyshakespeare.txt --output benchmarks/results
    python benchmarks/fp8_loss.py tinyshakespeare.txt --seeds 8 --only "bf16|hybrid" --output benchmarks/results

The text is cut into bytes, the last tenth of which is for validation. The runs of one seed have the same weights,
samples and flags, but for those of their precision; a seed gives other weights and another order of the samples. A gap
is the loss over that of bf16 with the same seed, less 1; its mean over the seeds stands with its standard error. fp32
says what a rounding of another size does by itself. On a CPU the numbers that are multiplied are those of a GPU, and
sums are in fp32. A training loss is the mean of the last 100 steps; the validation is computed with all products in
bf16 (in fp32 for that run). With the default 256 bytes a step and a rate of 2e-3 two runs drift apart by some percent
for any rounding; --sequences and --lr make a calmer recipe, whose results have a name of their own. Seeds are the
outer loop, so that a measurement that is cut off has whole seeds; runs that the folder has from the same day are not
repeated.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.recording import heading, keep, sentence

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --lr-decay-style cosine --lr-warmup-iters 20 --adam-beta2 0.99 --weight-decay 0.1
    --clip-grad 1.0 --tokenizer-type ByteTokenizer --eval-interval 1000 --eval-iters 20
""")
RUNS = {
    "bf16": "--bf16",
    "fp32": "",
    **{
        f"{format_}, {recipe}": f"--bf16 --fp8-format {format_} --fp8-recipe {recipe}"
        for format_ in ("hybrid", "e4m3")
        for recipe in ("tensorwise", "rowwise", "blockwise")
    },
}
LAST = 100
SEQUENCES, LEARNING_RATE = 4, 2e-3
FIRST_SEED = 1234
"""The program's default; further seeds follow it."""

Losses = dict[str, dict[str, dict[str, float]]]
"""Name of a run -> seed -> what was measured."""


def write_text(text: bytes, folder: Path) -> list[str]:
    """Write training and validation data; return their flags."""
    from megatron_ext.data.indexed import IndexedWriter

    cut = len(text) * 9 // 10
    for name, part in (("train", text[:cut]), ("valid", text[cut:])):
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_tokens(np.frombuffer(part, np.uint8).astype(np.uint16).tobytes(), [len(part)])
    return f"--train-data-path {folder}/train --valid-data-path {folder}/valid --data-cache-path {folder}/cache".split()


def measured(flags: list[str], steps: int) -> dict[str, Any]:
    """Train once; return its losses."""
    from megatron_ext.plugins.prove.recorded_training import record

    run = record([*flags, "--train-iters", str(steps)], 1, steps)
    return {
        "training_loss": float(np.mean(run.losses[-LAST:])),
        "validation_loss": run.validation_loss,
        "first_loss": run.losses[0],
        "largest_grad_norm": max(norm for norm in run.grad_norms if norm is not None),
    }


def gaps(runs: Losses, name: str, which: str) -> list[float]:
    """Return a run's loss over that of bf16, less 1, for each seed that both have."""
    base = runs["bf16"]
    return [run[which] / base[seed][which] - 1 for seed, run in runs[name].items() if seed in base]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is NaN for one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def page(found: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    runs = found["runs"]
    rows = []
    for name, seeds in runs.items():
        cells = [name, str(len(seeds))]
        for which in ("training_loss", "validation_loss"):
            gap, error = mean_and_error(gaps(runs, name, which))
            spread = f"{gap:+.2%}" + ("" if name == "bf16" or math.isnan(error) else f" ± {error:.2%}")
            cells += [f"{statistics.fmean(run[which] for run in seeds.values()):.4f}", spread]
        largest = max(abs(gap) for gap in gaps(runs, name, "training_loss"))
        cells += [f"{largest:.2%}", f"{max(run['largest_grad_norm'] for run in seeds.values()):.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            f"# Loss in FP8 and in bf16, {found['date']}",
            "",
            f"{sentence(found)} {found['steps']} steps of {found['sequences']} x 64 bytes of "
            f"{found['text']} at a rate of {found['lr']:g}; the "
            f"training loss is the mean of the last {LAST} steps, in nats per byte. A gap is to bf16 with the same "
            "seed: mean over the seeds and its standard error. `benchmarks/fp8_loss.py`.",
            "",
            "| run | seeds | training loss | gap | validation loss | gap | largest gap in training | largest gradient "
            "norm |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file of at least 100 kB of text")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each precision")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of 64 bytes, in a step")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="largest learning rate; the least is a tenth")
    parser.add_argument("--only", default="", help="pattern of the names of runs; bf16 is always run")
    parser.add_argument("--output", type=Path, help="folder for the results; without it they are printed alone")
    args = parser.parse_args()
    found: dict[str, Any] = {**heading(), "steps": args.steps, "text": args.text.name}
    found |= {"sequences": args.sequences, "lr": args.lr}
    usual = (args.sequences, args.lr) == (SEQUENCES, LEARNING_RATE)
    file = "fp8_loss" if usual else f"fp8_loss-{args.sequences}-sequences-lr-{args.lr:g}"
    before = args.output / f"{file}-{found['date']}.json" if args.output is not None else None
    runs: Losses = json.loads(before.read_text())["runs"] if before is not None and before.exists() else {}
    found["runs"] = runs
    rate = f"--lr {args.lr} --min-lr {args.lr / 10} --micro-batch-size {args.sequences}".split()
    rate += ["--global-batch-size", str(args.sequences)]
    chosen = {name: flags for name, flags in RUNS.items() if name == "bf16" or re.search(args.only, name)}
    with tempfile.TemporaryDirectory() as folder:
        data = write_text(args.text.read_bytes(), Path(folder))
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
            for name, flags in chosen.items():
                if str(seed) in runs.get(name, {}):
                    continue
                words = [*FLAGS, *data, *flags.split(), "--seed", str(seed), *rate]
                runs.setdefault(name, {})[str(seed)] = measured(words, args.steps)
                print(seed, name, runs[name][str(seed)], flush=True)
                if args.output is not None:
                    keep(args.output, file, found, page(found))
    print(page(found))


if __name__ == "__main__":
    main()
