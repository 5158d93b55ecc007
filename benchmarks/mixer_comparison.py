#!/usr/bin/env python3
"""Compares how well layers of attention and hybrids of three recurrent layers to one of attention learn, at equal
parameters and tokens, on the quickstart's corpus.

    bash benchmarks/learning_data.sh runs/learning
    OMP_NUM_THREADS=1 python benchmarks/mixer_comparison.py --data runs/learning --output benchmarks/results

Each model has four layers of a mixer and an MLP. The mixers have about as many parameters as attention, and the width
of the MLPs makes up for the rest. The learning rate of each is the best of one seed at the small size, on a grid of
factors of 2. Runs that the folder's runs.jsonl has are not trained again.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning_runs import (
    ADAMW,
    MLP,
    WIDTHS,
    Comparison,
    arguments,
    best_of,
    compare,
    corpus,
    model,
    parameters,
    schedule,
    tuned,
    write,
)

DELTA = "--linear-key-head-dim 32 --linear-value-head-dim 32 --linear-attention-freq 4"


def mixers(size: str) -> dict[str, list[str]]:
    """Return the flags of each mixer."""
    heads = WIDTHS[size] // 32
    delta = f"{DELTA} --linear-num-key-heads {heads // 2} --linear-num-value-heads {heads}"
    mamba = f"--mamba-head-dim 32 --mamba-num-heads {heads} --mamba-num-groups 1 --mamba-state-dim 64"
    return {
        "attention": ["--num-layers", "4"],
        "Gated DeltaNet": f"--num-layers 4 --experimental-attention-variant gated_delta_net {delta}".split(),
        "Kimi Delta Attention": f"--num-layers 4 --experimental-attention-variant kda {delta}".split(),
        "Mamba-2": f"--hybrid-layer-pattern M-M-M-*- {mamba}".split(),
    }


@functools.cache
def mlp_width(size: str, mixer: str, data: tuple[str, ...]) -> int:
    """Return the width of the MLPs, a multiple of 8, with which a model has as many parameters as that of attention.

    Args:
        data: the flags of its data.
    """
    flags = [*data, *schedule(1e-3, 20)]
    wanted = parameters([*model(size, MLP[size]), *mixers(size)["attention"], *flags])
    counts = {
        width: parameters([*model(size, width), *mixers(size)[mixer], *flags])
        for width in range(MLP[size] - 64, MLP[size] + 65, 8)
    }
    return min(counts, key=lambda width: abs(counts[width] - wanted))


def main() -> None:
    given = arguments(__doc__)

    data = corpus(given.data, "code")

    def flags(mixer: str, size: str, rate: float) -> list[str]:
        return [
            *model(size, mlp_width(size, mixer, tuple(data))),
            *mixers(size)[mixer],
            *data,
            *schedule(rate, given.steps),
            *ADAMW.split(),
        ]

    by_name = {mixer: functools.partial(flags, mixer) for mixer in mixers("1M")}
    tried = tuned(given, by_name, dict.fromkeys(by_name, 2e-3))
    rates = {mixer: best_of(losses) for mixer, losses in tried.items()}
    write(given, "mixer_comparison", {"code": Comparison(tried, compare(given, by_name, rates))})


if __name__ == "__main__":
    main()
