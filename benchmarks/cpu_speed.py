#!/usr/bin/env python3
"""Measures tokens/s of one CPU process with two threads, against the same model written plainly in torch.

    python benchmarks/cpu_speed.py              # eager
    python benchmarks/cpu_speed.py --compile    # both with torch.compile

Every contestant has a process of its own, and they take turns in short blocks of steps, each round in another order:
whatever else the machine does hits all of them. The figure is the median, over the rounds, of the ratio of two
neighbouring blocks. Ours is the real program: `Trainer.fit` with its callbacks, loader and data files. Plain gets the
same initial weights and the same batches ready in memory, and pays for no data loading. The losses of the first 20
steps must agree within 1e-5, or nothing is reported. On a machine that others use as well, set
OMP_WAIT_POLICY=PASSIVE: threads that spin while they wait make two of them slower than one.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

THREADS = 2
BATCH, SEQUENCE = 12, 64
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 352, "vocab": 257, "sequence": SEQUENCE}
RECIPE = {"warmup": 10, "peak": 1e-3, "lowest": 1e-4, "beta2": 0.99, "weight_decay": 0.1, "clip": 1.0}
COMPARED_STEPS, TOLERANCE = 20, 1e-5
FLAGS = f"""
    --device cpu --num-layers 4 --num-attention-heads 4 --hidden-size 128 --seq-length {SEQUENCE}
    --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 352 --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size {BATCH} --global-batch-size {BATCH}
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10
    --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 --tokenizer-type ByteTokenizer
    --eval-interval 0 --log-interval 100""".split()


@dataclass(frozen=True)
class Contestant:
    name: str
    ours: bool
    flags: tuple[str, ...] = ()
    real_data: bool = True
    fused: bool | None = None
    compiled: bool = False


EAGER = (
    Contestant("ours", ours=True),
    Contestant("plain", ours=False),
    Contestant("plain, AdamW(fused=True)", ours=False, fused=True),
)
COMPILED = (
    Contestant("ours", ours=True, flags=("--torch-compile",)),
    Contestant("plain", ours=False, compiled=True),
    Contestant("plain, AdamW(fused=True)", ours=False, fused=True, compiled=True),
)
LOADING = (
    Contestant("ours", ours=True),
    Contestant("ours, --num-workers 0", ours=True, flags=("--num-workers", "0")),
    Contestant("ours, --mock-data", ours=True, flags=("--mock-data",), real_data=False),
    Contestant("ours, --mock-data --num-workers 0", True, ("--mock-data", "--num-workers", "0"), real_data=False),
)


@dataclass(frozen=True)
class Block:
    """One turn of one contestant."""

    seconds: float
    cpu_seconds: float
    losses: list[float]


def write_data(folder: Path) -> list[str]:
    """Write a megabyte of Python's standard library as bytes; return the flags that train on it."""
    import numpy as np

    from megatron_ext.data.indexed import IndexedWriter

    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))[: 1 << 20]
    with IndexedWriter(folder / "text", np.uint16) as writer:
        document = np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(256))
        writer.add_tokens(document.tobytes(), [len(document)])
    return ["--train-data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache")]


def run_ours(pipe: Connection, contestant: Contestant, data_flags: list[str], steps: int) -> None:
    """Run the real program, stopped between blocks by a callback."""
    from megatron_ext import device
    from megatron_ext.train.configure import configure

    data = data_flags if contestant.real_data else []
    config = configure([*FLAGS, *data, *contestant.flags, "--train-iters", str(steps)]).config
    here = device.install("cpu")
    from megatron_ext.model.names import global_named_parameters
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.signals import SignalWatcher
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.standard import standard_callbacks
    from megatron_ext.train.step import StepResult
    from megatron_ext.train.trainer import Callback, Trainer

    class Turns(Callback):
        def __init__(self) -> None:
            self.left = 0
            self.block: list[float] = []
            self.started = (0.0, 0.0)

        def on_step_begin(self, trainer: Trainer) -> None:
            if self.left == 0:
                self.left = pipe.recv()
                self.started = (time.perf_counter(), time.process_time())

        def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
            self.block.append(result.loss)
            self.left -= 1
            if self.left == 0:
                wall, cpu = self.started
                pipe.send(Block(time.perf_counter() - wall, time.process_time() - cpu, self.block))
                self.block = []

    run = build_run(config, here)
    weights = {name: weight.detach().numpy() for name, weight in global_named_parameters(run.chunks)}
    batches = [run.loaders.train.global_batch(step * BATCH, 1)[0] for step in range(steps)]
    pipe.send((weights, [(batch.tokens, batch.labels) for batch in batches]) if contestant.real_data else None)
    with SignalWatcher(None) as signals:
        Trainer(run, [*standard_callbacks(run, signals, RunStatus(rank=0)), Turns()]).fit()
    run.loaders.close()


def run_plain(pipe: Connection, contestant: Contestant, steps: int) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from plain_gpt import PlainGPT, Recipe, Sizes, load_megatron_weights, make_optimizer, train_step

    weights, batches = pipe.recv()
    sizes, recipe = Sizes(**SIZES), Recipe(steps=steps, **RECIPE)
    plain = PlainGPT(sizes)
    load_megatron_weights(plain, {name: torch.from_numpy(weight) for name, weight in weights.items()}, sizes)
    optimizer = make_optimizer(plain, recipe, contestant.fused)
    model: Any = torch.compile(plain) if contestant.compiled else plain
    step = 0
    while step < steps:
        block = range(step, step + pipe.recv())
        wall, cpu = time.perf_counter(), time.process_time()
        losses = [train_step(model, optimizer, recipe, number, *batches[number]) for number in block]
        pipe.send(Block(time.perf_counter() - wall, time.process_time() - cpu, losses))
        step = block.stop


def start(function: Callable[..., None], *arguments: object) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return here, process


def measure(contestants: tuple[Contestant, ...], rounds: int, block: int) -> dict[str, list[Block]]:
    """Return blocks of every contestant, one a round, after a first block (at least the compared steps) to warm up."""
    warmup = max(block, COMPARED_STEPS)
    steps = warmup + rounds * block
    results: dict[str, list[Block]] = {contestant.name: [] for contestant in contestants}
    with tempfile.TemporaryDirectory() as folder:
        data_flags = write_data(Path(folder))
        pipes, processes, inputs = {}, [], None
        for contestant in contestants:
            arguments = (contestant, data_flags, steps) if contestant.ours else (contestant, steps)
            pipe, process = start(run_ours if contestant.ours else run_plain, *arguments)
            if contestant.ours:
                inputs = pipe.recv() or inputs
            else:
                pipe.send(inputs)
            pipes[contestant.name] = pipe
            processes.append(process)
        names = [contestant.name for contestant in contestants]
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                pipes[name].send(block if number else warmup)
                results[name].append(pipes[name].recv())
        for process in processes:
            process.join()
    return results


def check_losses(contestants: tuple[Contestant, ...], results: dict[str, list[Block]]) -> float:
    """Return the largest difference of the losses of the first steps; end the program when it is too large."""
    first = {c.name: results[c.name][0].losses[:COMPARED_STEPS] for c in contestants if c.real_data}
    reference = next(iter(first.values()))
    distance = max(abs(a - b) for losses in first.values() for a, b in zip(reference, losses, strict=True))
    if not distance <= TOLERANCE:
        sys.exit(f"the losses differ by {distance:.2e}, more than {TOLERANCE}: not the same training\n{first}")
    return distance


def summary(results: dict[str, list[Block]]) -> dict[str, dict[str, float]]:
    """Return per contestant: median tokens/s, median CPU time per step, and median speed relative to the first one."""
    reference, *_ = results.values()
    rows = {}
    for name, (_, *blocks) in results.items():
        rows[name] = {
            "tokens_per_second": statistics.median(len(b.losses) * BATCH * SEQUENCE / b.seconds for b in blocks),
            "cpu_ms_per_step": statistics.median(1000.0 * b.cpu_seconds / len(b.losses) for b in blocks),
            "ours_is_times_as_fast": statistics.median(
                b.seconds / r.seconds for r, b in zip(reference[1:], blocks, strict=True)
            ),
            "ours_is_times_as_fast_by_cpu_time": statistics.median(
                b.cpu_seconds / r.cpu_seconds for r, b in zip(reference[1:], blocks, strict=True)
            ),
        }
    return rows


def machine(threads: int) -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    about = record["machine"]
    lines = [
        f"# Speed on a CPU, {record['mode']}, {record['date']}",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads (OMP_WAIT_POLICY "
        f"{about['wait_policy']}), Python {about['python']}, torch "
        f"{about['torch']}; load average {about['load_average']} before the start. {record['rounds']} rounds of "
        f"{record['block']} steps in turns, batch {BATCH} x {SEQUENCE} tokens. Largest difference of the losses over "
        f"{COMPARED_STEPS} steps: {record['loss_difference']:.1e}.",
        "",
        "| | tokens/s | CPU ms per step | ours is faster by (time) | ours is faster by (CPU time) |",
        "|---|---|---|---|---|",
    ]
    for name, row in record["contestants"].items():
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['cpu_ms_per_step']:.1f} | "
            f"{row['ours_is_times_as_fast']:.3f}x | {row['ours_is_times_as_fast_by_cpu_time']:.3f}x |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--compile", action="store_true", help="both with torch.compile")
    what.add_argument("--loading", action="store_true", help="ours with and without files and background threads")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=30, help="steps of one turn")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    mode, contestants = ("compiled", COMPILED) if given.compile else ("eager", EAGER)
    if given.loading:
        mode, contestants = "data loading", LOADING
    about = machine(given.threads)
    results = measure(contestants, given.rounds, given.block)
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "mode": mode,
        "machine": about,
        "rounds": given.rounds,
        "block": given.block,
        "loss_difference": check_losses(contestants, results),
        "contestants": summary(results),
    }
    print(report(record))
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        stem = given.output / f"cpu_speed-{mode.replace(' ', '-')}-{record['date']}"
        blocks = {name: [asdict(block) | {"losses": None} for block in blocks] for name, blocks in results.items()}
        stem.with_suffix(".json").write_text(json.dumps(record | {"blocks": blocks}, indent=1) + "\n")
        stem.with_suffix(".md").write_text(report(record))


if __name__ == "__main__":
    main()
