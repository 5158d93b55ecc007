#!/usr/bin/env python3
"""Measures the speed of a mixture of experts by that of a dense model with as many operations for each token.

    python benchmarks/expert_speed.py --write benchmarks/results     # 3 minutes on two cores

Both have 4 layers of 256 channels; one has 8 experts of which 2 compute a token, the other an MLP as wide as two of
them. They are trained in turns, each time by new processes of one thread: by one, and by two data-parallel ones, which
share the experts. Speed is the median over turns of the dense model's time by that of the experts: by the clock, which
says something where there is a core for each process and no other work, and by processor time of all processes.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, keep, sentence
from megatron_ext.verify.ranks import run_ranks

WIDTH = 512
"""Of an expert."""
FLAGS = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 4 --mock-data
    --vocab-size 1000 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --train-iters 1000 --lr 1e-4 --eval-interval 0 --device cpu --num-workers 0
"""
EXPERTS = f"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size {WIDTH} --moe-aux-loss-coeff 0.01"
DENSE = f"--ffn-hidden-size {2 * WIDTH}"
LAYOUTS = {
    "one process": (1, ""),
    "EP2, all-gather": (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"),
    "EP2, all-to-all": (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
}
"""Ranks, and flags of the model with experts. The dense one has as many data-parallel ranks."""


def seconds(flags: str, warm_up: int, steps: int, profiled: str | None = None) -> tuple[float, float]:
    """On a rank: return the time of a step by the clock, and this process's processor time."""
    import cProfile

    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags.split()).config, device.install("cpu"))
    trainer = Trainer(run, [])
    for _ in range(warm_up):
        trainer.step()
    profile = cProfile.Profile(time.process_time)
    if profiled is not None:
        profile.enable()
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        trainer.step()
    taken = (time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps
    if profiled is not None:
        profile.disable()
        profile.dump_stats(f"{profiled}.{run.rank}")
    run.loaders.close()
    return taken


def turns(ranks: int, layout: str, given: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return of both models the times of each turn: by the clock, and the processor time of all ranks."""
    found: dict[str, list[tuple[float, float]]] = {"dense": [], "experts": []}
    for _ in range(given.turns):
        for name, own in (("dense", DENSE), ("experts", f"{EXPERTS} {layout}")):
            flags = f"{FLAGS} --global-batch-size {4 * ranks} {own}"
            of_ranks = run_ranks(ranks, seconds, flags, given.warm_up, given.steps)
            found[name].append((max(clock for clock, _ in of_ranks), sum(processor for _, processor in of_ranks)))
    return found


def speed(found: dict[str, list[tuple[float, float]]], which: int) -> float:
    """Return the median over turns of the dense model's time by that of the experts."""
    pairs = zip(found["dense"], found["experts"], strict=True)
    return statistics.median(dense[which] / experts[which] for dense, experts in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns of each model")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of a turn that are not measured")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn that are")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="folder for the .json and .md of this run")
    parser.add_argument("--profile", metavar="FILE", help="profile one turn of the experts on two ranks instead")
    given = parser.parse_args()
    if given.profile is not None:
        ranks, layout = LAYOUTS["EP2, all-to-all"]
        flags = f"{FLAGS} --global-batch-size {4 * ranks} {EXPERTS} {layout}"
        print(
            json.dumps(run_ranks(ranks, seconds, flags, given.warm_up, given.steps, str(Path(given.profile).resolve())))
        )
        return
    record: dict[str, Any] = heading()
    record["layouts"] = {name: turns(ranks, layout, given) for name, (ranks, layout) in LAYOUTS.items()}
    lines = [
        f"# Speed of experts by that of a dense model, {record['date']}",
        "",
        f"{sentence(record)} `python benchmarks/expert_speed.py`: {given.turns} turns of {given.steps} steps.",
        "",
        "| | ms of a step, dense | experts | speed by the clock | CPU ms, dense | experts | speed by CPU time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in record["layouts"].items():
        columns = []
        for which in (0, 1):
            medians = (statistics.median(one[which] for one in found[model]) for model in ("dense", "experts"))
            columns += [*(f"{1e3 * median:.1f}" for median in medians), f"{speed(found, which):.2f}"]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write is not None:
        keep(given.write, "expert_speed", record, text)


if __name__ == "__main__":
    main()
