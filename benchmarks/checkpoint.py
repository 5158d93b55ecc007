"""Seconds of a save, of the stall of --async-save, and of loading, beside `cp` of the same files.

    python benchmarks/checkpoint.py /dev/shm/checkpoint --json benchmarks/results/checkpoint-DATE.json

A model of 29M parameters with Adam's state (0.35 GB in fp32), on one process and on two with the distributed
optimizer. The fastest of --turns; a machine that is busy with other things measures itself.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.verify.ranks import run_ranks

FLAGS = shlex.split("""
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --swiglu --seq-length 32
    --max-position-embeddings 32 --mock-data --vocab-size 8000 --micro-batch-size 1 --global-batch-size 2
    --train-iters 10 --lr 1e-3 --eval-interval 0 --device cpu
""")


def measure(flags: list[str], folder: str, turns: int) -> dict[str, float]:
    """On every rank: the fastest of some saves of each kind, and of some loads, in seconds."""
    import torch

    from megatron_ext import device
    from megatron_ext.checkpoint.load import load_checkpoint
    from megatron_ext.checkpoint.save import Save, save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags).config, device.install("cpu"))
    Trainer(run, []).step()
    found: dict[str, list[float]] = {"save": [], "stall of --async-save": [], "async save, to its end": [], "load": []}

    def timed(name: str, started: float) -> None:
        torch.distributed.barrier()
        found[name].append(time.perf_counter() - started)

    for _ in range(turns):
        started = time.perf_counter()
        save_checkpoint(run, folder)
        timed("save", started)
        started = time.perf_counter()
        pending = Save(run, folder, background=True)
        timed("stall of --async-save", started)
        pending.finish()
        timed("async save, to its end", started)
        started = time.perf_counter()
        load_checkpoint(run, folder)
        timed("load", started)
    return {name: min(seconds) for name, seconds in found.items()}


def copy_seconds(source: Path, destination: Path, turns: int) -> float:
    """The fastest `cp -r`."""
    seconds = []
    for _ in range(turns):
        started = time.perf_counter()
        subprocess.run(["cp", "-r", source, destination], check=True)
        seconds.append(time.perf_counter() - started)
        shutil.rmtree(destination)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of saving and loading.")
    parser.add_argument("folder", type=Path, help="made, and removed at the end; 1.1 GB")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    load, results = os.getloadavg()[0], {}
    for ranks, more in ((1, []), (2, ["--use-distributed-optimizer"])):
        folder = options.folder / str(ranks)
        folder.mkdir(parents=True)
        per_rank = run_ranks(ranks, measure, [*FLAGS, *more], str(folder), options.turns)
        seconds = {name: max(rank[name] for rank in per_rank) for name in per_rank[0]}
        [saved] = folder.glob("iter_*")
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        seconds["cp"] = copy_seconds(saved, folder / "copy", options.turns)
        results[f"{ranks} rank(s)"] = {"bytes": size, "seconds": seconds}
        print(f"{ranks} rank(s), {size / 1e9:.2f} GB")
        for name, value in seconds.items():
            print(f"  {name:24} {value:6.2f} s {size / value / 1e9:6.2f} GB/s")
    shutil.rmtree(options.folder)
    machine = {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine(), "load_average": load}
    content = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine, "results": results}
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
