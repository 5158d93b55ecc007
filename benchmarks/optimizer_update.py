#!/usr/bin/env python3
"""Measures an update of the matrices of a model on a CPU, by every optimizer of this program, and by torch's Muon
and Adafactor.

    python benchmarks/optimizer_update.py --output benchmarks/results    # a minute

Time is the median of some updates in turns, in seconds of one thread. torch's Muon multiplies in bf16, ours on a CPU in
fp32 (docs/decisions.md).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence, tell

SIZES = ((4, 64), (8, 128), (8, 256), (4, 512))
"""Layers and widths."""


def optimizers(layers: int, width: int) -> dict[str, Any]:
    """Return each optimizer with weights and gradients of its own: those of attention and an MLP of four widths."""
    import torch

    from megatron_ext import device
    from megatron_ext.optim.muon import Muon
    from megatron_ext.optim.short_adam import ShortAdam
    from megatron_ext.plugins.optimizers.adafactor import Adafactor
    from megatron_ext.plugins.optimizers.adaptive_muon import AdaptiveMuon
    from megatron_ext.plugins.optimizers.ademamix import AdEMAMix
    from megatron_ext.plugins.optimizers.lion import Lion
    from megatron_ext.plugins.optimizers.schedule_free import ScheduleFree

    device.install("cpu")
    torch.set_num_threads(1)

    def weights() -> list[torch.nn.Parameter]:
        torch.manual_seed(1)
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
        made = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        for one in made:
            one.grad = torch.randn_like(one)
        return made

    return {
        "AdamW, fused": torch.optim.AdamW(weights(), fused=True),
        "AdamW in bf16": ShortAdam(weights()),
        "SGD": torch.optim.SGD(weights(), momentum=0.9),
        "Lion": Lion(weights()),
        "AdEMAMix": AdEMAMix(weights()),
        "schedule-free": ScheduleFree(weights()),
        "Adafactor": Adafactor(weights()),
        "torch.optim.Adafactor": torch.optim.Adafactor(weights()),
        "Muon": Muon(weights()),
        "AdaptiveMuon": AdaptiveMuon(weights()),
        "torch.optim.Muon": torch.optim.Muon(weights()),
    }


def milliseconds(layers: int, width: int, rounds: int) -> dict[str, float]:
    """Return the median of each optimizer's updates, without the first."""
    each = optimizers(layers, width)
    found: dict[str, list[float]] = {name: [] for name in each}
    for _ in range(rounds + 1):
        for name, optimizer in each.items():
            began = time.thread_time()
            optimizer.step()
            found[name].append(1e3 * (time.thread_time() - began))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="updates of each optimizer")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()
    record: dict[str, Any] = heading()
    record["rows"] = [
        {"layers": layers, "width": width, "ms": milliseconds(layers, width, given.rounds)} for layers, width in SIZES
    ]
    names = [*record["rows"][0]["ms"]]
    lines = [
        f"# Update of all matrices of a model, {record['date']}",
        "",
        f"{sentence(record)} `python benchmarks/optimizer_update.py`: ms of one thread, fp32 weights.",
        "",
        f"| layers x width | elements | {' | '.join(names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in record["rows"]:
        size, times = 12 * row["layers"] * row["width"] ** 2, " | ".join(f"{row['ms'][name]:.2f}" for name in names)
        lines.append(f"| {row['layers']} x {row['width']} | {size:,} | {times} |")
    text = "\n".join(lines) + "\n"
    tell(given.output, "optimizer_update", record, text)


if __name__ == "__main__":
    main()
