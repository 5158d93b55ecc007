#!/usr/bin/env python3
"""Measures which learning rate is best by width, with --use-mup and without: two layers, bytes of a corpus.

    python tools/python_corpus.py --output-prefix corpus --package transformers --files "models/*/modeling_*.py" \\
        --without-header
    python tools/preprocess_data.py --input corpus_train.jsonl --output-prefix corpus --tokenizer-type ByteTokenizer
    python benchmarks/mup_transfer.py --data-path corpus_text_document --output benchmarks/results

Each width begins with the best rate of the one before, and tries those twice as large and half as large until the best
lies between two. Loss is the mean of the last ten steps and of the seeds, in nats per byte. Runs that --runs has are
not trained again. Without --use-mup matrices begin with a standard deviation of
1 over the root of the width, as usual; at the base width of 64 both are the same.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning_runs import Runs, best_rate
from benchmarks.recording import heading, sentence, tell

BASE, HEAD = 64, 16
MODEL = (
    "--num-layers 2 --seq-length 64 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--micro-batch-size 8 --global-batch-size 8 --lr-warmup-iters 10 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --weight-decay 0 --tokenizer-type ByteTokenizer --eval-interval 0 "
    "--device cpu --log-interval 1000000"
)
MUP = f"--use-mup --mup-base-hidden-size {BASE} --mup-base-head-dim {HEAD} --init-method-std {1 / math.sqrt(BASE)}"
# At the base, the updates of square matrices are of one size in both modes: 0.2 x the root of the width.
MUON = "--optimizer muon --muon-nesterov --muon-scale-mode"
SPECTRAL, UNIT = f"{MUON} spectral --muon-extra-scale-factor 0.2", f"{MUON} unit_rms_norm --muon-extra-scale-factor 1.6"


def flags(optimizer: str, mup: bool, width: int) -> list[str]:
    """Return the flags of a model of this width, but for its learning rate."""
    update = "" if optimizer == "adam" else UNIT if mup else SPECTRAL
    begin = MUP if mup else f"--init-method-std {1 / math.sqrt(width)}"
    sizes = f"--hidden-size {width} --num-attention-heads {width // HEAD}"
    return f"{MODEL} {sizes} {begin} {update}".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, required=True, help="prefix of .bin and .idx")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/mup.jsonl"), help="file of the runs; its are not trained again"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--optimizers", nargs="+", default=["adam", "muon"], choices=("adam", "muon"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()
    runs = Runs(given.runs)
    record: dict[str, Any] = heading()
    record |= {"steps": given.steps, "seeds": given.seeds, "tables": []}
    text = [
        f"# Best learning rate by width, {record['date']}",
        "",
        f"{sentence(record)} `python benchmarks/mup_transfer.py`: loss in nats per byte after {given.steps} steps of "
        f"512 bytes, mean of {given.seeds} seed{'s' * (given.seeds > 1)}; the best of each width in bold, between "
        "its neighbours.",
    ]
    for optimizer, mup in ((optimizer, mup) for optimizer in given.optimizers for mup in (False, True)):
        title = f"{optimizer}, {'--use-mup' if mup else 'standard parametrization'}"
        found: dict[int, dict[float, float]] = {}
        best = 0.008
        for width in given.widths:
            words = [*flags(optimizer, mup, width), "--data-path", str(given.data_path)]

            def loss(rate: float, words: list[str] = words) -> float:
                seeds = range(1, given.seeds + 1)
                last = [runs.run([*words, "--lr", str(rate)], given.steps, seed).losses[-1] for seed in seeds]
                return math.inf if any(map(math.isnan, last)) else sum(last) / len(last)

            found[width] = best_rate(loss, best)
            best = min(found[width], key=found[width].__getitem__)
        record["tables"].append({"title": title, "losses": found})
        rates = sorted(set().union(*found.values()))
        text += ["", f"## {title}", "", f"| width | {' | '.join(f'{rate:g}' for rate in rates)} |"]
        text.append("|---" * (len(rates) + 1) + "|")
        for width, row in found.items():
            cells = [f"{row[rate]:.3f}" if rate in row else "" for rate in rates]
            at = rates.index(min(row, key=row.__getitem__))
            cells[at] = f"**{cells[at]}**"
            text.append(f"| {width} | {' | '.join(cells)} |")
    page = "\n".join(text) + "\n"
    tell(given.output, f"mup_transfer_{'_'.join(given.optimizers)}", record, page)


if __name__ == "__main__":
    main()
