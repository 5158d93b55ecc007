"""Measures the seconds of a save, of the stall of --async-save, and of loading, next to `cp` of the same files.

    python benchmarks/checkpoint.py /dev/shm/checkpoint --output benchmarks/results

A model of 29M parameters with Adam's state (0.35 GB in fp32), on one process and on two with the distributed optimizer.
The stall of the first background save of a run and of later ones is stated next to the pure copy of the bytes that a
rank takes, from memory to memory that was used before: no snapshot is faster. The fastest of --turns; a machine that is
busy with other things measures itself. --output FOLDER records the table and the machine as JSON and Markdown.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence, tell
from megatron_ext.forkserver.ranks import run_ranks

FLAGS = shlex.split("""
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --swiglu --seq-length 32
    --max-position-embeddings 32 --mock-data --vocab-size 8000 --micro-batch-size 1 --global-batch-size 2
    --train-iters 10 --lr 1e-3 --eval-interval 0 --device cpu
""")


def measure(flags: list[str], folder: str, turns: int) -> dict[str, float]:
    """Return on every rank the fastest of some saves of each kind, and of some loads, in seconds."""
    import torch

    from megatron_ext import device
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.checkpoint.native.save import Kept, Save, save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(flags).config, device.install("cpu"))
    Trainer(run, []).step()
    found: dict[str, list[float]] = {}

    def timed(name: str, action: Any) -> Any:
        torch.distributed.barrier()
        started = time.perf_counter()
        result = action()
        found.setdefault(name, []).append(time.perf_counter() - started)
        return result

    for _ in range(turns):
        timed("save", lambda: save_checkpoint(run, folder))
        kept = Kept()
        for stall in ("stall of the first --async-save", "stall of later ones", "stall of later ones"):
            started = time.perf_counter()
            pending = timed(stall, lambda kept=kept: Save(run, folder, background=True, kept=kept))
            pending.join()
            timed("stall when it is written, for its name", pending.finish)
            found.setdefault("async save, to its end", []).append(time.perf_counter() - started)
        source, target = (torch.ones(kept.memory.bytes, dtype=torch.uint8) for _ in range(2))
        timed("pure copy of the bytes that a rank takes", lambda pair=(target, source): pair[0].copy_(pair[1]))
        timed("load", lambda: load_checkpoint(run, folder))
    return {name: min(seconds) for name, seconds in found.items()}


def copy_seconds(source: Path, destination: Path, turns: int) -> float:
    """Return the seconds of the fastest `cp -r`."""
    seconds = []
    for _ in range(turns):
        started = time.perf_counter()
        subprocess.run(["cp", "-r", source, destination], check=True)
        seconds.append(time.perf_counter() - started)
        shutil.rmtree(destination)
    return min(seconds)


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = [
        f"# Saving and loading, {record['date']}",
        "",
        f"{sentence(record)} {record['folder']}; the fastest of {record['turns']} turns, of the slowest rank.",
        "",
        "| ranks | GB | what | s | GB/s |",
        "|---|---|---|---|---|",
    ]
    for ranks, result in record["results"].items():
        size = result["bytes"] / 1e9
        for name, seconds in result["seconds"].items():
            lines.append(f"| {ranks} | {size:.2f} | {name} | {seconds:.3f} | {size / seconds:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of saving and loading.")
    parser.add_argument("folder", type=Path, help="made, and removed at the end; 1.1 GB")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    options = parser.parse_args()
    record: dict[str, Any] = heading() | {"folder": str(options.folder), "turns": options.turns, "results": {}}
    for ranks, more in ((1, []), (2, ["--use-distributed-optimizer"])):
        folder = options.folder / str(ranks)
        folder.mkdir(parents=True)
        per_rank = run_ranks(ranks, measure, [*FLAGS, *more], str(folder), options.turns)
        seconds = {name: max(rank[name] for rank in per_rank) for name in per_rank[0]}
        [saved] = folder.glob("iter_*")
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        seconds["cp"] = copy_seconds(saved, folder / "copy", options.turns)
        record["results"][str(ranks)] = {"bytes": size, "seconds": seconds}
    shutil.rmtree(options.folder)
    tell(options.output, "checkpoint", record, report(record))


if __name__ == "__main__":
    main()
