#!/usr/bin/env python3
"""Measures how far FP8 takes the loss of a small model from that of bf16, over 500 steps on a CPU.

    python benchmarks/fp8_loss.py tinyshakespeare.txt --output benchmarks/results

The text is cut into bytes, the last tenth of which is for validation. Every run has the same weights, samples and
flags, but for those of its precision; fp32 says how much bf16 itself changes. On a CPU the numbers that are multiplied
are those of a GPU, and sums are in fp32. A training loss is the mean of the last 100 steps; the validation is computed
with all products in bf16 (in fp32 for the first run). Runs that the folder has from the same day are not repeated.
"""

import argparse
import json
import shlex
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
    --attention-dropout 0 --micro-batch-size 4 --global-batch-size 4 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine
    --lr-warmup-iters 20 --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 --tokenizer-type ByteTokenizer
    --eval-interval 1000 --eval-iters 20
""")
RUNS = {
    "fp32": "",
    "bf16": "--bf16",
    **{
        f"{format_}, {recipe}": f"--bf16 --fp8-format {format_} --fp8-recipe {recipe}"
        for format_ in ("hybrid", "e4m3")
        for recipe in ("tensorwise", "rowwise", "blockwise")
    },
}
LAST = 100


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
    from megatron_ext.verify.record import record

    run = record([*flags, "--train-iters", str(steps)], 1, steps)
    return {
        "training_loss": float(np.mean(run.losses[-LAST:])),
        "validation_loss": run.validation_loss,
        "first_loss": run.losses[0],
        "largest_grad_norm": max(norm for norm in run.grad_norms if norm is not None),
    }


def page(found: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    runs, base = found["runs"], found["runs"]["bf16"]
    rows = [
        f"| {name} | {run['training_loss']:.4f} | {run['training_loss'] / base['training_loss'] - 1:+.2%} | "
        f"{run['validation_loss']:.4f} | {run['validation_loss'] / base['validation_loss'] - 1:+.2%} | "
        f"{run['largest_grad_norm']:.2f} |"
        for name, run in runs.items()
    ]
    return "\n".join(
        [
            f"# Loss in FP8 and in bf16, {found['date']}",
            "",
            f"{sentence(found)} torch {found['torch']}. {found['steps']} steps of 256 bytes of {found['text']}; the "
            f"training loss is the mean of the last {LAST} steps, in nats per byte. `benchmarks/fp8_loss.py`.",
            "",
            "| run | training loss | to bf16 | validation loss | to bf16 | largest gradient norm |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file of at least 100 kB of text")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path, help="folder for the results; without it they are printed alone")
    args = parser.parse_args()
    import torch

    found: dict[str, Any] = {**heading(), "torch": torch.__version__, "steps": args.steps, "text": args.text.name}
    before = args.output / f"fp8_loss-{found['date']}.json" if args.output is not None else None
    found["runs"] = json.loads(before.read_text())["runs"] if before is not None and before.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        data = write_text(args.text.read_bytes(), Path(folder))
        for name, flags in RUNS.items():
            if name in found["runs"]:
                continue
            found["runs"][name] = measured([*FLAGS, *data, *flags.split()], args.steps)
            print(name, found["runs"][name], flush=True)
            if args.output is not None and "bf16" in found["runs"]:
                keep(args.output, "fp8_loss", found, page(found))
    print(page(found))


if __name__ == "__main__":
    main()
