"""Runs one training case of benchmarks/gpu_session.py: `gpu_trial.py DEVICE KIND FLAGS`.

KIND is `loss` (20 steps on the device whose losses are finite and fall), `match` (the same steps on the CPU and on the
device, whose losses agree), `speed` (medians over the steps after the first ten, in bf16), `switch` (the same without
and with the flags after a `|`, whose losses agree; without them a session runs once), `graphs` (likewise, and they
agree in every step), `stall` (how long background saves stop the training) or `roofline` (benchmarks/train_step.py of
the size that FLAGS names). Prints RESULT and the figures as JSON; exit code 1 where they are wrong.
"""

import hashlib
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LARGEST_FIRST_LOSS_DIFFERENCE = {32: 1e-5, 16: 1e-2}
"""Tolerance by bits of the weights."""
WARMUP_STEPS, TIMED_STEPS = 10, 20
TIMED = f"--bf16 --log-interval 1 --train-iters {WARMUP_STEPS + TIMED_STEPS}"
KEPT = "GPU_SESSION_KEPT"
"""Variable of the folder in which a session keeps timed runs, by which a switch knows how it is without it."""


def main(device: str, kind: str, flags: str) -> None:
    kinds = {
        "loss": falling_loss,
        "match": match,
        "speed": speed,
        "switch": switch,
        "graphs": graphs,
        "stall": stall,
        "roofline": roofline,
    }
    figures = kinds[kind](device, flags)
    print("RESULT", json.dumps(figures), flush=True)
    if figures.pop("wrong", None):
        sys.exit(1)


def falling_loss(device: str, flags: str) -> dict[str, Any]:
    """Return the first and the last loss of a run."""
    losses = [row["lm_loss"] for row in train(device, flags)]
    wrong = not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]
    return {"first loss": losses[0], "last loss": losses[-1], **({"wrong": "it does not fall"} if wrong else {})}


def match(device: str, flags: str) -> dict[str, Any]:
    """Return the largest differences between the losses of the device and of the CPU."""
    here, there = ([row["lm_loss"] for row in train(kind, flags)] for kind in ("cpu", device))
    differences = [abs(a - b) for a, b in zip(here, there, strict=True)]
    tolerance = LARGEST_FIRST_LOSS_DIFFERENCE[16 if "--bf16" in flags or "--fp16" in flags else 32]
    wrong = {} if differences[0] <= tolerance else {"wrong": f"{there[0]!r} and {here[0]!r} on the CPU"}
    return {"first step": differences[0], "20 steps": max(differences), **wrong}


def speed(device: str, flags: str) -> dict[str, Any]:
    """Return the medians over the timed steps of a run in bf16."""
    return medians(timed(device, flags))


def switch(device: str, flags: str) -> dict[str, Any]:
    """Return the medians without and with what stands after the `|`, and how far the losses are apart."""
    plain, switched = flags.split("|")
    off, on = timed(device, plain), train(device, f"{plain} {switched} {TIMED}")
    differences = [abs(a["lm_loss"] - b["lm_loss"]) for a, b in zip(off, on, strict=True)]
    apart = {"first step": differences[0], "all steps": max(differences)}
    wrong = {} if differences[0] <= LARGEST_FIRST_LOSS_DIFFERENCE[16] else {"wrong": "the losses are others"}
    return {"off": medians(off), "on": medians(on), **apart, **wrong}


def graphs(device: str, flags: str) -> dict[str, Any]:
    """Return what `switch` does, the losses of all steps compared: the first ones run without a graph in either case.
    Further, how many times as fast it is with the flags, and from which step on losses are not the same to the bit."""
    plain, switched = flags.split("|")
    off = train(device, f"{plain} {TIMED}")
    on, said = logged(device, f"{plain} {switched} {TIMED}")
    differences = [abs(a["lm_loss"] - b["lm_loss"]) for a, b in zip(off, on, strict=True)]
    figures: dict[str, Any] = {"off": medians(off), "on": medians(on), "all steps": max(differences)}
    figures["times as fast"] = figures["off"]["elapsed_ms"] / figures["on"]["elapsed_ms"]
    figures["first other loss"] = next((step for step, apart in enumerate(differences, 1) if apart > 0.0), None)
    if device == "cuda" and not re.search("^graphs ", said, re.MULTILINE):
        return {**figures, "wrong": "the program made no graph"}
    agree = all(apart <= LARGEST_FIRST_LOSS_DIFFERENCE[16] for apart in differences)
    return figures if agree else {**figures, "wrong": "the losses are others"}


def stall(device: str, flags: str) -> dict[str, Any]:
    """Return what background saves cost: for how long each stopped the training, as the program says it; the bytes of a
    checkpoint; and how much longer steps take while one is written."""
    steps, interval = (45, 15) if device == "cuda" else (12, 4)
    with tempfile.TemporaryDirectory() as folder:
        saved = f"--save {folder} --save-interval {interval} --async-save --keep-last-checkpoints 1"
        rows, said = logged(device, f"{flags} --bf16 --log-interval 1 --train-iters {steps} {saved}")
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    stops = [float(seconds) for seconds in re.findall(r"training stopped for ([\d.]+) s", said)]
    times = [row["elapsed_ms"] for row in rows]
    first, after = times[interval // 2 : interval - 1], times[2 * interval + 1 : 2 * interval + 6]
    figures = {"seconds stopped": stops, "bytes": sum(sizes), "ms": statistics.median(first)}
    figures["ms while writing"] = statistics.median(after)
    return figures if stops else {**figures, "wrong": "nothing was saved in the background"}


def roofline(device: str, size: str) -> dict[str, Any]:
    """Return what a step reaches of the machine, and where its time goes."""
    from benchmarks.train_step import measure

    return measure(device, size, WARMUP_STEPS, 20)


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the timed steps."""
    timed = rows[WARMUP_STEPS:]
    return {
        name: None if timed[0][name] is None else statistics.median(row[name] for row in timed)
        for name in ("elapsed_ms", "tokens_per_second", "tflops_per_gpu", "mfu", "peak_memory_bytes")
    }


def timed(device: str, flags: str) -> list[dict[str, Any]]:
    """Return the logged steps of a timed run, which is not made again where the session has made it."""
    return kept(" ".join([device, *flags.split(), TIMED]), lambda: train(device, f"{flags} {TIMED}"))


def kept(name: str, run: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of a run, which a session makes once under this name."""
    folder = os.environ.get(KEPT)
    if folder is None:
        return run()
    path = Path(folder) / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    if path.exists():
        return json.loads(path.read_text())
    rows = run()
    whole = path.with_suffix(".partial")
    whole.write_text(json.dumps(rows))
    whole.rename(path)
    return rows


def train(device: str, flags: str) -> list[dict[str, Any]]:
    """Return the logged steps of one run of the program."""
    return logged(device, flags)[0]


def logged(device: str, flags: str) -> tuple[list[dict[str, Any]], str]:
    """Return the logged steps of one run of the program, and what it printed, which this process prints as well."""
    rows, said = metrics(device, flags)
    return [row for row in rows if "lm_loss" in row], said


def metrics(device: str, flags: str, ranks: int = 1) -> tuple[list[dict[str, Any]], str]:
    """Return all rows of a run's metrics file, of evaluations, too, and what it printed; torchrun starts its ranks."""
    from megatron_ext.untrusted.metrics_rows import read_rows

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        command = [sys.executable, *torchrun, "pretrain_gpt.py", "--device", device, *shlex.split(flags)]
        given = [*command, "--metrics-file", str(path)]
        process = subprocess.Popen(given, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, given)
        return list(read_rows(path)), "".join(said)


if __name__ == "__main__":
    main(*sys.argv[1:])
