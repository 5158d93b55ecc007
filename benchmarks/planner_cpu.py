"""Trains small layouts on CPU ranks and predicts those of 8 processes from one of 2 (tools/plan.py --calibrate).

    python benchmarks/planner_cpu.py [--json FILE]

The 2-process run gives the correction; the others are estimated with it and then measured. All processes share the
cores of this machine (--processor-cores).
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_MODEL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --seq-length 256 --vocab-size 4096 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --global-batch-size 16 --micro-batch-size 2 "
    "--train-iters 14 --lr 1e-4 --mock-data --log-interval 1 --device cpu"
)
LAYOUTS = {
    "2 processes: DP2": (2, ""),
    "2 processes: PP2": (2, "--pipeline-model-parallel-size 2"),
    "8 processes: DP8": (8, ""),
    "8 processes: TP2 PP2 DP2": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "8 processes: TP2 SP PP4": (
        8,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4",
    ),
}


def trained(processes: int, layout: str, metrics: Path) -> None:
    """Train a layout; its metrics file is at `metrics`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0"]
    command += ["pretrain_gpt.py", *_MODEL.split(), *layout.split(), "--metrics-file", str(metrics)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)


def measured(metrics: Path) -> float:
    """Return the median seconds of a step."""
    sys.path.insert(0, str(ROOT))
    from megatron_ext.plan.calibrate import read_metrics

    return read_metrics(metrics).seconds


def predicted(processes: int, layout: str, cores: int, metrics: Path, measured_layout: str) -> float:
    """Return the estimate that the first run corrects."""
    command = [sys.executable, "tools/plan.py", "--evaluate", "--world-size", str(processes), "--device", "cpu"]
    command += ["--processor-cores", str(cores), "--calibrate", str(metrics), "--json", "-"]
    command += ["--calibrate-flags", shlex.join([*_MODEL.split(), *measured_layout.split(), "--world-size", "2"])]
    command += ["--", *_MODEL.split(), *layout.split()]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(found.stdout)["step_seconds"]


def main() -> None:
    """Train, predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processor-cores", type=int, default=os.cpu_count())
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        first = None
        for number, (name, (processes, layout)) in enumerate(LAYOUTS.items()):
            metrics = Path(folder) / f"{number}.jsonl"
            trained(processes, layout, metrics)
            first = first or metrics
            seconds = measured(metrics)
            estimate = predicted(processes, layout, options.processor_cores, first, LAYOUTS["2 processes: DP2"][1])
            rows.append({"layout": name, "measured_seconds": seconds, "predicted_seconds": estimate})
            print(
                f"{name:28} measured {seconds:.3f} s, predicted {estimate:.3f} s ({estimate / seconds:.2f})", flush=True
            )
            if options.json is not None:
                load = os.getloadavg()[0]
                date = datetime.date.today().isoformat()
                found = {"date": date, "cores": options.processor_cores, "load_average": load, "runs": rows}
                options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
