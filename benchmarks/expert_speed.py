#!/usr/bin/env python3
"""Measures the speed of a mixture of experts by that of a dense model with as many operations for each token.

    python benchmarks/expert_speed.py --write benchmarks/results     # 12 minutes on two cores

Both have 4 layers of 256 channels; one has 8 experts of which 2 compute a token, the other an MLP as wide as two of
them. They are trained in turns, each time by new processes of one thread: by one, and by two data-parallel ones, which
share the experts. Speed is the median over turns of the dense model's time by that of the experts: by the clock, which
says something where there is a core for each process and no other work, and by processor time of all processes.

A model at its beginning routes unevenly, and the rank with fewer tokens waits in each layer: `load` is the (token,
expert) pairs of the rank that has most by the mean of the ranks, the mean over layers and steps. What experts do in
a step takes that many times as long in any program that leaves them where they are. So it is measured with routing as
it is, and with random routing (--moe-router-force-load-balancing).
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence, tell
from megatron_ext.forkserver.ranks import run_ranks

WIDTH = 512
"""Of an expert."""
FLAGS = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --mock-data
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
BALANCED = "--moe-router-force-load-balancing"
LAYOUTS |= {
    f"{name}, balanced": (ranks, f"{flags} {BALANCED}") for name, (ranks, flags) in LAYOUTS.items() if ranks > 1
}
"""Ranks, and flags of the model with experts. The dense one has as many data-parallel ranks."""


def seconds(flags: str, warm_up: int, steps: int, profiled: str | None = None) -> tuple[float, float, list[int]]:
    """On a rank: return the time of a step by the clock, this process's processor time, and how many (token, expert)
    pairs it computed in each layer of each step."""
    import cProfile

    from megatron_ext import device
    from megatron_ext.parts.experts.compute import GroupedExperts
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags.split()).config, device.install("cpu"))
    trainer = Trainer(run, [])
    for _ in range(warm_up):
        trainer.step()
    pairs: list[int] = []
    for part in (part for chunk in run.chunks for part in chunk.modules() if isinstance(part, GroupedExperts)):
        part.register_forward_hook(lambda _part, given, _output: pairs.append(len(given[0])))
    profile = cProfile.Profile(time.process_time)
    if profiled is not None:
        profile.enable()
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        trainer.step()
    taken = (time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps, pairs
    if profiled is not None:
        profile.disable()
        profile.dump_stats(f"{profiled}.{run.rank}")
    run.loaders.close()
    return taken


def batch(sequences: int, ranks: int) -> str:
    """Return the flags of both models, and those of one microbatch for each rank."""
    return f"{FLAGS} --micro-batch-size {sequences} --global-batch-size {sequences * ranks}"


def turns(
    ranks: int, layout: str, sequences: int, given: argparse.Namespace
) -> dict[str, list[tuple[float, float, float]]]:
    """Return of both models the numbers of each turn: time by the clock, processor time of all ranks, and load."""
    found: dict[str, list[tuple[float, float, float]]] = {"dense": [], "experts": []}
    for _ in range(given.turns):
        for name, own in (("dense", DENSE), ("experts", f"{EXPERTS} {layout}")):
            flags = f"{batch(sequences, ranks)} {own}"
            of_ranks = run_ranks(ranks, seconds, flags, given.warm_up, given.steps)
            clocks, processors, pairs = zip(*of_ranks, strict=True)
            loads = [max(ones) / statistics.mean(ones) for ones in zip(*pairs, strict=True)]
            found[name].append((max(clocks), sum(processors), statistics.mean(loads or [1.0])))
    return found


def speed(found: dict[str, list[tuple[float, float, float]]], which: int) -> float:
    """Return the median over turns of the dense model's time by that of the experts."""
    pairs = zip(found["dense"], found["experts"], strict=True)
    return statistics.median(dense[which] / experts[which] for dense, experts in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sequences = "numbers of sequences, of 256 tokens, that a rank computes in a step"
    parser.add_argument("--sequences", type=int, nargs="+", default=[4, 16], help=sequences)
    parser.add_argument("--turns", type=int, default=5, help="turns of each model")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of a turn that are not measured")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn that are")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="folder for the .json and .md of this run")
    parser.add_argument("--profile", metavar="FILE", help="profile one turn of the experts on two ranks instead")
    given = parser.parse_args()
    if given.profile is not None:
        ranks, layout = LAYOUTS["EP2, all-to-all"]
        flags = f"{batch(given.sequences[0], ranks)} {EXPERTS} {layout}"
        print(
            json.dumps(run_ranks(ranks, seconds, flags, given.warm_up, given.steps, str(Path(given.profile).resolve())))
        )
        return
    record: dict[str, Any] = heading()
    record["layouts"] = {
        f"{sequences} sequences, {name}": turns(ranks, layout, sequences, given)
        for sequences in given.sequences
        for name, (ranks, layout) in LAYOUTS.items()
    }
    lines = [
        f"# Speed of experts by that of a dense model, {record['date']}",
        "",
        f"{sentence(record)} `python benchmarks/expert_speed.py`: {given.turns} turns of {given.steps} steps.",
        "",
        "| | ms of a step, dense | experts | speed by the clock | CPU ms, dense | experts | speed by CPU time | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in record["layouts"].items():
        columns = []
        for which in (0, 1):
            medians = (statistics.median(one[which] for one in found[model]) for model in ("dense", "experts"))
            columns += [*(f"{1e3 * median:.1f}" for median in medians), f"{speed(found, which):.2f}"]
        load = statistics.median(one[2] for one in found["experts"])
        lines.append(f"| {name} | {' | '.join(columns)} | {load:.2f} |")
    text = "\n".join(lines) + "\n"
    tell(given.write, "expert_speed", record, text)


if __name__ == "__main__":
    main()
