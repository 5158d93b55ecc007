#!/usr/bin/env python3
"""Measures which learning rate is best by width, with --use-mup and without: two layers, bytes of a corpus.

    python tools/python_corpus.py --output-prefix corpus --package transformers --files "models/*/modeling_*.py" \\
        --without-header
    python tools/preprocess_data.py --input corpus_train.jsonl --output-prefix corpus --tokenizer-type ByteTokenizer
    python benchmarks/mup_transfer.py --data-path corpus_text_document --output benchmarks/results    # 15 minutes

Loss is the mean of the last ten steps, in nats per byte. Without --use-mup matrices begin with a standard deviation of
1 over the root of the width, as usual; at the base width of 64 both are the same.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, keep, sentence

BASE, HEAD = 64, 16
MODEL = (
    "--num-layers 2 --seq-length 64 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--micro-batch-size 8 --global-batch-size 8 --lr-warmup-iters 10 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --weight-decay 0 --tokenizer-type ByteTokenizer --eval-interval 0"
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


def losses(given: argparse.Namespace, words: Sequence[str], rate: float, seeds: int) -> list[float]:
    """Return the last loss of each seed; NaN where it is lost."""
    from megatron_ext.verify.ranks import RankError
    from megatron_ext.verify.recorded_training import record

    found = []
    for seed in range(1, seeds + 1):
        run = ["--data-path", str(given.data_path), "--train-iters", str(given.steps), "--seed", str(seed)]
        try:
            last = record([*words, *run, "--lr", str(rate)], 1, given.steps).losses[-10:]
            found.append(sum(last) / len(last))
        except RankError as error:
            if "NumericError" not in str(error):
                raise
            found.append(math.nan)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, required=True, help="prefix of .bin and .idx")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--optimizers", nargs="+", default=["adam", "muon"], choices=("adam", "muon"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rates", type=int, default=7, help="learning rates from 0.001 on, each twice the last")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()
    began = time.time()
    record: dict[str, Any] = heading()
    record |= {"steps": given.steps, "seeds": given.seeds, "tables": []}
    rates = [0.001 * 2**power for power in range(given.rates)]
    text = [
        f"# Best learning rate by width, {record['date']}",
        "",
        f"{sentence(record)} `python benchmarks/mup_transfer.py`: loss in nats per byte after {given.steps} steps of "
        f"512 bytes, {given.seeds} seed{'s' * (given.seeds > 1)}; the best of each width in bold.",
    ]
    for optimizer, mup in ((optimizer, mup) for optimizer in given.optimizers for mup in (False, True)):
        title = f"{optimizer}, {'--use-mup' if mup else 'standard parametrization'}"
        table = {}
        for width in given.widths:
            found = [losses(given, flags(optimizer, mup, width), rate, given.seeds) for rate in rates]
            table[width] = [sum(each) / len(each) for each in found]
            print(title, width, [f"{loss:.4f}" for loss in table[width]], flush=True)
        record["tables"].append({"title": title, "rates": rates, "losses": table})
        text += ["", f"## {title}", "", f"| width | {' | '.join(f'{rate:g}' for rate in rates)} |"]
        text.append("|---" * (len(rates) + 1) + "|")
        for width, row in table.items():
            best = min(loss for loss in row if not math.isnan(loss))
            cells = " | ".join(f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in row)
            text.append(f"| {width} | {cells} |")
    record["seconds"] = round(time.time() - began)
    page = "\n".join(text) + "\n"
    print(page)
    if given.output is not None:
        keep(given.output, "mup_transfer", record, page)


if __name__ == "__main__":
    main()
