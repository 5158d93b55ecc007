#!/usr/bin/env python3
"""Compares optimizers by held-out loss, against tokens and against processor seconds, on two corpora.

    bash benchmarks/learning_data.sh runs/learning tinyshakespeare.txt
    OMP_NUM_THREADS=1 python benchmarks/optimizer_comparison.py --data runs/learning --output benchmarks/results

The learning rate of each is the best of one seed at the small size, on a grid of factors of 2, on each corpus. Rates
fall to a tenth along a cosine, but for the schedule-free AdamW, which takes none. Runs that the folder's runs.jsonl has
are not trained again.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning_runs import (
    ADAMW,
    MLP,
    Comparison,
    arguments,
    best_of,
    compare,
    corpus,
    model,
    schedule,
    tuned,
    write,
)

# Muon's updates have the size of Adam's (arXiv:2502.16982). Lion's are larger at the same rate, so that its best rate
# is smaller; what decays is the rate times the weight decay (arXiv:2302.06675).
OPTIMIZERS = {
    "AdamW": (ADAMW, 2e-3),
    "Muon": (
        "--optimizer muon --muon-nesterov --muon-scale-mode spectral --muon-extra-scale-factor 0.2 --adam-beta2 0.95",
        8e-3,
    ),
    "Lion": ("--optimizer lion --weight-decay 1", 5e-4),
    "schedule-free AdamW": ("--optimizer schedule_free --adam-beta2 0.95", 4e-3),
}


def main() -> None:
    given = arguments(__doc__, corpora=("code", "tinyshakespeare"))

    def flags(optimizer: str, data: str, size: str, rate: float) -> list[str]:
        decay = "constant" if optimizer == "schedule-free AdamW" else "cosine"
        return [
            *model(size, MLP[size]),
            "--num-layers",
            "4",
            *corpus(given.data, data),
            *schedule(rate, given.steps, decay),
            *OPTIMIZERS[optimizer][0].split(),
        ]

    found = {}
    for data in given.corpora:
        by_name = {name: functools.partial(flags, name, data) for name in OPTIMIZERS}
        tried = tuned(given, by_name, {name: rate for name, (_, rate) in OPTIMIZERS.items()})
        rates = {name: best_of(losses) for name, losses in tried.items()}
        found[data] = Comparison(tried, compare(given, by_name, rates))
    write(given, "optimizer_comparison", found)


if __name__ == "__main__":
    main()
