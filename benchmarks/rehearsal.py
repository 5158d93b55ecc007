"""Plays ranks of worlds of many sizes, one process each, and says what their start costs and what grows with the world.

    python benchmarks/rehearsal.py --world-size 1024 16384
    python benchmarks/rehearsal.py --world-size 1024 --save      # and the plan of a checkpoint, by all ranks' metadata

Llama 3 8B as TP8 x PP8 x DP, with sequence parallelism and the distributed optimizer, over a synthetic corpus of
200,000 documents (an index of 4 MB). No other rank is there: torch's fake process group lets collectives return, and
tensors have no memory. So the figures are those of the Python of one rank: no network, no NCCL, no drawing of weights.
Seconds are CPU seconds; of the data, "MB read" leaves out what is mapped. The power of the world by which a figure
grows is that between the smallest and the largest world. --save plays every rank, which takes a third of a second each;
with --folder DIR, a run that was cut off goes on with those that it has not played.
"""

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import ROOT, heading, keep, sentence

MODEL = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0
    --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 128256 --bf16 --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer --micro-batch-size 1
    --train-iters 3 --lr 1e-4 --eval-interval 2 --eval-iters 1 --num-workers 0 --device cpu
"""
MODEL_RANKS = 64
DOCUMENTS, TOKENS = 200_000, 100
QUANTITIES = {
    "seconds": "CPU s",
    "bytes": "MB",
    "new_group_calls": "new_group",
    "files": "files",
    "bytes_read": "MB read",
}


def write_corpus(folder: Path) -> None:
    """Write the documents."""
    import numpy as np

    from megatron_ext.data.indexed import IndexedWriter

    tokens = (np.arange(DOCUMENTS * TOKENS) % 30_000).astype(np.uint16)
    with IndexedWriter(folder / "text", np.uint16) as writer:
        writer.add_tokens(tokens.tobytes(), [TOKENS] * DOCUMENTS)


def flags(world_size: int, folder: Path) -> list[str]:
    """Return the flags of the run, whose batch grows with the world: four microbatches a replica."""
    batch = ["--global-batch-size", str(4 * world_size // MODEL_RANKS)]
    data = f"--data-path {folder}/text --split 90,10,0 --data-cache-path {folder}/cache"
    return [*MODEL.split(), *batch, *data.split()]


def play(world_size: int, rank: int, folder: Path) -> None:
    """In a process of its own: play a rank, print its phases, and keep what rank 0 told the others."""
    from megatron_ext import device

    device.install("cpu")
    from benchmarks.rehearsed_rank import rehearse

    told = folder / f"told-{world_size}"
    heard = pickle.loads(told.read_bytes()) if rank else []
    found = rehearse(flags(world_size, folder), world_size, rank, heard)
    if rank == 0:
        told.write_bytes(pickle.dumps(found.told))
    print(json.dumps([vars(phase) for phase in found.phases]))


def played(world_size: int, rank: int, folder: Path) -> list[dict[str, Any]]:
    """Return the phases of a rank that a new process plays."""
    command = [sys.executable, __file__, "--world-size", str(world_size), "--play", str(rank), "--folder", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        sys.exit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def plan_of_all(world_size: int, folder: Path) -> dict[str, float]:
    """In this process: play all ranks but 0, then rank 0 with what they sent; return what its plan costs."""
    from megatron_ext import device

    device.install("cpu")
    from benchmarks.rehearsed_rank import rehearse

    told = pickle.loads((folder / f"told-{world_size}").read_bytes())
    sent = []
    for rank in range(1, world_size):
        file = folder / f"sent-{world_size}-{rank}"
        if not file.exists():
            played_rank = rehearse(flags(world_size, folder), world_size, rank, told, measures=False)
            whole = file.with_suffix(".part")
            whole.write_bytes(pickle.dumps(played_rank.sent))
            whole.rename(file)
            print(f"played rank {rank} of {world_size}", end="\r", file=sys.stderr, flush=True)
        sent.append(pickle.loads(file.read_bytes()))
    last = rehearse(flags(world_size, folder), world_size, 0, gathered=sent).phases
    plan = next(phase for phase in last if phase.name == "checkpoint: plan")
    return {
        "world_size": world_size,
        "seconds_of_the_plan_on_rank_0": plan.seconds,
        "bytes_of_the_plan_on_rank_0": plan.bytes,
        "bytes_gathered": sum(len(pickled) for of_rank in sent for pickled in of_rank),
    }


def power(small: float, large: float, ratio: float) -> str:
    """Return the exponent p of large / small = ratio ** p; "0" for what is too small to tell."""
    if small <= 0 or large <= 0 or ratio <= 1:
        return "0" if small == large else "-"
    return f"{math.log(large / small) / math.log(ratio):.2f}"


def table(record: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    sizes = sorted({run["world_size"] for run in record["runs"]})
    lines = [f"# Ranks of {', '.join(f'{size:,}' for size in sizes)}, rehearsed on {record['date']}", ""]
    lines += [sentence(record), "", *(line.strip() for line in (__doc__ or "").strip().split("\n")[5:]), ""]
    for name in dict.fromkeys(run["name"] for run in record["runs"]):
        runs = {run["world_size"]: run["phases"] for run in record["runs"] if run["name"] == name}
        lines += [f"## {name}", "", f"| phase | | {' | '.join(f'{size:,}' for size in sizes)} | power |"]
        lines.append("|---|---|" + "---|" * (len(sizes) + 1))
        for number, phase in enumerate(runs[sizes[0]]):
            for quantity, unit in QUANTITIES.items():
                scale = 1e6 if "bytes" in quantity else 1.0
                values = [runs[size][number][quantity] / scale for size in sizes]
                if not any(values):
                    continue
                shown = " | ".join(f"{value:.3g}" for value in values)
                exponent = power(values[0], values[-1], sizes[-1] / sizes[0])
                lines.append(f"| {phase['name']} | {unit} | {shown} | {exponent} |")
        lines.append("")
    for plan in record["plans"]:
        seconds, held = plan["seconds_of_the_plan_on_rank_0"], plan["bytes_of_the_plan_on_rank_0"] / 1e6
        lines.append(
            f"Plan of a checkpoint by rank 0 of {plan['world_size']:,}: {seconds:.2f} CPU s, {held:.0f} MB held, from "
            f"{plan['bytes_gathered'] / 1e6:.1f} MB gathered."
        )
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Play, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, nargs="+", default=[1024, 16384], help="multiples of 64")
    parser.add_argument("--save", action="store_true", help="plan a checkpoint of the smallest world, by all its ranks")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to work; what the ranks sent stays there")
    options = parser.parse_args()
    if any(size % MODEL_RANKS for size in options.world_size):
        parser.error(f"--world-size {options.world_size}: a replica of the model is on {MODEL_RANKS} ranks")
    if options.play is not None:
        play(options.world_size[0], options.play, options.folder)
        return
    record: dict[str, Any] = {**heading(), "runs": [], "plans": []}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(folder)
        for size in sorted(options.world_size):
            ranks = {"first stage": 0, "the rank next to it": 1, "middle stage": size // 2, "last stage": size - 1}
            for name, rank in ranks.items():
                record["runs"].append({"name": name, "world_size": size, "phases": played(size, rank, folder)})
                print(f"{size} ranks, {name}: played", flush=True)
        if options.save:
            record["plans"].append(plan_of_all(min(options.world_size), folder))
    text = table(record)
    print(text)
    keep(options.output, "rehearsal", record, text)


if __name__ == "__main__":
    main()
