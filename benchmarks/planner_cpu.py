"""Trains small layouts on CPU ranks and predicts those of 8 processes from one of 2 (tools/plan.py --calibrate).

    python benchmarks/planner_cpu.py [--json FILE] [--steps N]
    python benchmarks/planner_cpu.py --calls    the calls of cost/hardware.py: a model too small to compute much

The 2-process run gives the correction; the others are estimated with it and then compared with what they took. All
processes share the cores of this machine (--processor-cores). Two figures of each layout are given: the median seconds
of a step on the clock, and the seconds that its processes computed over the cores, which other work on the machine
changes far less: 8 processes get more of a busy machine than 2. Each is predicted from the same figure of the first
run. The second is no time of a step where cores wait, as they may with 2 processes and a pipeline.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_MODEL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --seq-length 256 --vocab-size 4096 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --global-batch-size 16 --micro-batch-size 2 "
    "--lr 1e-4 --mock-data --tokenizer-type NullTokenizer --eval-iters 0 --log-interval 1 --device cpu"
)
LAYOUTS = {
    "2 processes: DP2": (2, ""),
    "8 processes: DP8": (8, ""),
    "8 processes: TP2 PP2 DP2": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "8 processes: TP2 SP PP4": (
        8,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4",
    ),
    "2 processes: PP2": (2, "--pipeline-model-parallel-size 2"),
}
_WARM_UP = 2  # steps
_SMALL = (
    "--hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --micro-batch-size 1 --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --eval-iters 0 --log-interval 1 --device cpu"
)


def clocked(words: list[str], output: str) -> list[tuple[float, float]]:
    """Train on this rank; return seconds and computed seconds of every step but the first two."""
    from megatron_ext.train.pretrain import pretrain
    from megatron_ext.train.trainer import Callback, Trainer

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    clocks: list[tuple[float, float]] = []

    class Clock(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            clocks.append((time.monotonic(), time.process_time()))

    pretrain(words, callbacks=[Clock])
    steps = zip(clocks[_WARM_UP:], clocks[_WARM_UP + 1 :], strict=False)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in steps]


def calls(steps: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return the seconds of a layer's, of a microbatch's and of a step's calls, on the clock and computed: the
    differences between runs of one process with 2 and 10 layers, and with 2 and 10 microbatches."""
    few, deep, long = (
        trained(1, f"--num-layers {layers} --global-batch-size {batch}", steps, 1, folder / "calls.log", _SMALL)
        for layers, batch in ((2, 2), (10, 2), (2, 10))
    )
    found = {}
    for figure in few:
        layer = (deep[figure] - few[figure]) / (8 * 2)
        microbatch = (long[figure] - few[figure]) / 8 - 2 * layer
        found[figure] = {"layer": layer, "pass": microbatch, "step": few[figure] - 2 * (microbatch + 2 * layer)}
    return found


def trained(processes: int, layout: str, steps: int, cores: int, output: Path, model: str = _MODEL) -> dict[str, float]:
    """Train a layout; return the median seconds of a step on the clock, and computed over the cores."""
    from megatron_ext.forkserver.ranks import run_ranks

    # The step that ends at the last one's beginning is the last that is measured.
    words = [*model.split(), *layout.split(), "--train-iters", str(_WARM_UP + steps + 1)]
    ranks = run_ranks(processes, clocked, words, str(output), timeout=3000.0)
    on_the_clock = [max(rank[step][0] for rank in ranks) for step in range(steps)]
    computed = [sum(rank[step][1] for rank in ranks) for step in range(steps)]
    return {"clock": statistics.median(on_the_clock), "computed": statistics.median(computed) / min(cores, processes)}


def predicted(processes: int, layout: str, cores: int, first: float, folder: Path) -> float:
    """Return the estimate that a first run of so many seconds a step corrects."""
    metrics = folder / "metrics.jsonl"
    metrics.write_text(json.dumps({"elapsed_ms": 1000.0 * first, "global_batch_size": 16, "world_size": 2}) + "\n")
    flags = [*_MODEL.split(), "--train-iters", "1"]
    command = [sys.executable, "tools/plan.py", "--evaluate", "--world-size", str(processes), "--device", "cpu"]
    command += ["--processor-cores", str(cores), "--calibrate", str(metrics), "--json", "-"]
    command += ["--calibrate-flags", shlex.join([*flags, "--world-size", "2"]), "--", *flags, *layout.split()]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(found.stdout)["step_seconds"]


def main() -> None:
    """Train, predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=4, help="measured, after two that are not")
    parser.add_argument("--calls", action="store_true", help="measure the program's own calls, and nothing else")
    parser.add_argument("--processor-cores", type=int, default=os.cpu_count())
    options = parser.parse_args()
    cores, rows = options.processor_cores, []
    with tempfile.TemporaryDirectory() as name:
        folder, first = Path(name), {}
        if options.calls:
            print(json.dumps(calls(10 * options.steps, folder), indent=1))
            return
        for number, (layout, (processes, flags)) in enumerate(LAYOUTS.items()):
            found = trained(processes, flags, options.steps, cores, folder / f"{number}.log")
            first = first or found
            row: dict[str, Any] = {"layout": layout}
            for figure, seconds in found.items():
                estimate = predicted(processes, flags, cores, first[figure], folder)
                row[figure] = {"measured": seconds, "predicted": estimate, "ratio": estimate / seconds}
            rows.append(row)
            figures = ", ".join(
                f"{figure} {each['measured']:.3f} s, predicted {each['predicted']:.3f} ({each['ratio']:.2f})"
                for figure, each in row.items()
                if figure != "layout"
            )
            print(f"{layout:28} {figures}; load {os.getloadavg()[0]:.0f}", flush=True)
            row["load_average"] = os.getloadavg()[0]
            if options.json is not None:
                options.json.write_text(json.dumps(_report(options, rows), indent=1) + "\n")


def _report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), gloo",
        "torch": torch.__version__,
        "model": _MODEL,
        "steps": options.steps,
        "runs": rows,
    }


if __name__ == "__main__":
    main()
