#!/usr/bin/env python3
"""Measures tokens/s of one CPU process with two threads, against the same models elsewhere.

    python benchmarks/cpu_speed.py --nanogpt PATH --output benchmarks/results   # all there is, some 8 minutes
    python benchmarks/cpu_speed.py --only eager --sizes 4x128                   # a part of it
    python benchmarks/cpu_speed.py --only loading                               # ours with and without files

The Trainer takes part where the package accelerate is installed, which it needs.

Two models at two sizes: one of Llama's shape, against the same written plainly in torch (`plain_gpt.py`) and
transformers' Llama under its Trainer; and one of GPT-2's shape, against nanoGPT, from a copy of its repository.

Every contestant has a process of its own, and they take turns in short blocks of steps, each round in another order:
whatever else the machine does hits all of them. The figure is the median, over the rounds, of the ratio of two
neighbouring blocks. Ours is the real program: `Trainer.fit` with its callbacks, loader and data files. The others get
the same initial weights and the same batches ready in memory, and pay for no data loading; learning rates, AdamW,
clipping and precision (fp32) are the same. The losses of the first steps must agree within 1e-5, or nothing is
reported. On a machine that others use as well, set OMP_WAIT_POLICY=PASSIVE: threads that spin while they wait make two
of them slower than one.
"""

import argparse
import importlib.util
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
VOCABULARY = 257
RECIPE = {"warmup": 10, "peak": 1e-3, "lowest": 1e-4, "beta2": 0.99, "weight_decay": 0.1, "clip": 1.0}
TOLERANCE = 1e-5
FLAGS = (
    "--device cpu --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 10 --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 --tokenizer-type ByteTokenizer "
    "--eval-interval 0 --log-interval 100"
)
MOCK_IN_TURN = ("--mock-data", "--num-workers", "0")


@dataclass(frozen=True)
class Size:
    """One size of both models, and how long it is measured."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence: int
    batch: int
    block: int
    """Steps of one turn."""
    rounds: int
    compared: int
    """Steps of the first turn, which warms up and whose losses are compared."""

    def flags(self, shape: str) -> list[str]:
        """Return the flags of our model of this size."""
        sizes = f"--num-layers {self.layers} --num-attention-heads {self.heads} --hidden-size {self.hidden}"
        batch = f"--seq-length {self.sequence} --micro-batch-size {self.batch} --global-batch-size {self.batch}"
        llama = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
        own = f"{llama} --ffn-hidden-size {self.ffn}" if shape == LLAMA else ""
        return f"{sizes} {batch} {own} {FLAGS}".split()


SIZES = {
    "4x128": Size(4, 128, 4, 352, sequence=64, batch=12, block=20, rounds=8, compared=20),
    "6x384": Size(6, 384, 6, 1024, sequence=256, batch=4, block=3, rounds=5, compared=8),
}

LLAMA, GPT2 = "Llama's shape", "GPT-2's shape"


@dataclass(frozen=True)
class Contestant:
    name: str
    program: str
    """Which function runs it: "ours", "plain", "trainer" or "nanogpt"."""
    shape: str = LLAMA
    flags: tuple[str, ...] = ()
    real_data: bool = True
    fused: bool | None = None
    compiled: bool = False

    @property
    def ours(self) -> bool:
        return self.program == "ours"


def contestants_of(mode: str, *, with_nanogpt: bool) -> tuple[Contestant, ...]:
    """Return who takes part: of each shape ours first. transformers' Trainer needs the package accelerate."""
    if mode == "loading":
        return (
            Contestant("ours", "ours"),
            Contestant("ours, --num-workers 0", "ours", flags=("--num-workers", "0")),
            Contestant("ours, --mock-data", "ours", flags=("--mock-data",), real_data=False),
            Contestant("ours, --mock-data --num-workers 0", "ours", flags=MOCK_IN_TURN, real_data=False),
        )
    compiled = mode == "compiled"
    flags = ("--torch-compile",) if compiled else ()
    chosen = [
        Contestant("ours", "ours", flags=flags),
        Contestant("plain", "plain", compiled=compiled),
        Contestant("plain, AdamW(fused=True)", "plain", fused=True, compiled=compiled),
    ]
    if not compiled and importlib.util.find_spec("accelerate") is not None:
        chosen.append(Contestant("Hugging Face Trainer", "trainer"))
    if with_nanogpt:
        chosen.append(Contestant("ours, GPT-2's shape", "ours", shape=GPT2, flags=flags))
        chosen.append(Contestant("nanoGPT", "nanogpt", shape=GPT2, compiled=compiled))
    return tuple(chosen)


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


class Turns:
    """Takes turns in blocks of steps, as the other end of the pipe asks for them."""

    def __init__(self, pipe: Connection):
        self._pipe, self._left, self._losses = pipe, 0, []
        self._started = (0.0, 0.0)

    def before_step(self) -> None:
        if self._left == 0:
            self._left = self._pipe.recv()
            self._started = (time.perf_counter(), time.process_time())

    def after_step(self, loss: float) -> None:
        self._losses.append(loss)
        self._left -= 1
        if self._left == 0:
            wall, cpu = self._started
            self._pipe.send(Block(time.perf_counter() - wall, time.process_time() - cpu, self._losses))
            self._losses = []


def run_ours(pipe: Connection, contestant: Contestant, size: Size, data_flags: list[str], steps: int) -> None:
    """Run the real program, stopped between blocks by a callback."""
    from megatron_ext import device
    from megatron_ext.train.configure import configure

    data = data_flags if contestant.real_data else []
    flags = [*size.flags(contestant.shape), *data, *contestant.flags, "--train-iters", str(steps)]
    config = configure(flags).config
    here = device.install("cpu")
    from megatron_ext.model.names import global_named_parameters
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.signals import SignalWatcher
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.standard import standard_callbacks
    from megatron_ext.train.step import StepResult
    from megatron_ext.train.trainer import Callback, Trainer

    turns = Turns(pipe)

    class TakesTurns(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            turns.before_step()

        def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
            turns.after_step(result.loss)

    run = build_run(config, here)
    weights = {name: weight.detach().numpy() for name, weight in global_named_parameters(run.chunks)}
    batches = [run.loaders.train.global_batch(step * size.batch, 1)[0] for step in range(steps)]
    pipe.send((weights, [(batch.tokens, batch.labels) for batch in batches]) if contestant.real_data else None)
    with SignalWatcher(None) as signals:
        Trainer(run, [*standard_callbacks(run, signals, RunStatus(rank=0)), TakesTurns()]).fit()
    run.loaders.close()


def run_theirs(pipe: Connection, contestant: Contestant, size: Size, steps: int, nanogpt: str | None) -> None:
    """Run another program on the weights and batches that come through the pipe."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import cpu_peers

    weights, batches = pipe.recv()
    job = cpu_peers.Job(
        size=size,
        vocabulary=VOCABULARY,
        recipe=cpu_peers.Recipe(steps=steps, **RECIPE),
        weights={name: torch.from_numpy(weight) for name, weight in weights.items()},
        batches=batches,
        turns=Turns(pipe),
        fused=contestant.fused,
        compiled=contestant.compiled,
    )
    if contestant.program == "nanogpt":
        cpu_peers.run_nanogpt(job, str(nanogpt))
    else:
        {"plain": cpu_peers.run_plain, "trainer": cpu_peers.run_trainer}[contestant.program](job)


def start(function: Callable[..., None], *arguments: object) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return here, process


def measure(
    contestants: tuple[Contestant, ...], size: Size, nanogpt: str | None, rounds: int
) -> dict[str, list[Block]]:
    """Return blocks of every contestant, one a round, after a first block (of the compared steps) to warm up."""
    steps = size.compared + rounds * size.block
    results: dict[str, list[Block]] = {contestant.name: [] for contestant in contestants}
    pipes: dict[str, Connection] = {}
    processes: list[Any] = []
    inputs: dict[str, Any] = {}
    names = [contestant.name for contestant in contestants]
    with tempfile.TemporaryDirectory() as folder:
        data_flags = write_data(Path(folder))
        try:
            for contestant in contestants:
                if contestant.ours:
                    pipe, process = start(run_ours, contestant, size, data_flags, steps)
                else:
                    pipe, process = start(run_theirs, contestant, size, steps, nanogpt)
                processes.append(process)
                pipes[contestant.name] = pipe
                if contestant.ours:
                    inputs[contestant.shape] = pipe.recv() or inputs[contestant.shape]
                else:
                    pipe.send(inputs[contestant.shape])
            # The first steps, in which torch compiles, are taken by all at once.
            for name in names:
                pipes[name].send(size.compared)
            for name in names:
                results[name].append(pipes[name].recv())
            for number in range(rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    pipes[name].send(size.block)
                    results[name].append(pipes[name].recv())
            for process in processes:
                process.join()
        finally:
            # Ours takes a request to end for one to end after its step, which it waits for.
            for process in processes:
                process.kill()
    return results


def check_losses(contestants: tuple[Contestant, ...], results: dict[str, list[Block]]) -> float:
    """Return the largest difference of the losses of the first steps; end the program when it is too large."""
    distances = [0.0]
    for shape in {contestant.shape for contestant in contestants}:
        first = {c.name: results[c.name][0].losses for c in contestants if c.real_data and c.shape == shape}
        reference = next(iter(first.values()))
        distance = max(abs(a - b) for losses in first.values() for a, b in zip(reference, losses, strict=True))
        if not distance <= TOLERANCE:
            sys.exit(f"the losses differ by {distance:.2e}, more than {TOLERANCE}: not the same training\n{first}")
        distances.append(distance)
    return max(distances)


def summary(
    contestants: tuple[Contestant, ...], size: Size, results: dict[str, list[Block]]
) -> dict[str, dict[str, float]]:
    """Return per contestant: median tokens/s, median CPU time per step, and median speed relative to ours of its
    shape."""
    rows = {}
    for contestant in contestants:
        reference = next(c.name for c in contestants if c.ours and c.shape == contestant.shape)
        blocks, references = results[contestant.name][1:], results[reference][1:]
        pairs = list(zip(references, blocks, strict=True))
        tokens = size.batch * size.sequence
        rows[contestant.name] = {
            "tokens_per_second": statistics.median(len(b.losses) * tokens / b.seconds for b in blocks),
            "cpu_ms_per_step": statistics.median(1000.0 * b.cpu_seconds / len(b.losses) for b in blocks),
            "ours_is_times_as_fast": statistics.median(b.seconds / r.seconds for r, b in pairs),
            "ours_is_times_as_fast_by_cpu_time": statistics.median(b.cpu_seconds / r.cpu_seconds for r, b in pairs),
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
        f"# Speed on a CPU, {record['date']}",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads (OMP_WAIT_POLICY "
        f"{about['wait_policy']}), Python {about['python']}, torch {about['torch']}; load average "
        f"{about['load_average']} before the start. `{record['command']}`",
    ]
    for part in record["parts"]:
        size = part["size"]
        lines += [
            "",
            f"## {part['name']}, {part['mode']}",
            "",
            f"{part['rounds']} rounds of {size['block']} steps in turns, batch {size['batch']} x {size['sequence']} "
            f"tokens. Largest difference of the losses over {size['compared']} steps: {part['loss_difference']:.1e}.",
            "",
            "| | tokens/s | CPU ms per step | ours is faster by (time) | ours is faster by (CPU time) |",
            "|---|---|---|---|---|",
        ]
        for name, row in part["contestants"].items():
            lines.append(
                f"| {name} | {row['tokens_per_second']:,.0f} | {row['cpu_ms_per_step']:.1f} | "
                f"{row['ours_is_times_as_fast']:.3f}x | {row['ours_is_times_as_fast_by_cpu_time']:.3f}x |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("eager", "compiled", "loading"), help="one part; default: the first two")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="layers x hidden size")
    parser.add_argument("--nanogpt", type=Path, help="a copy of the repository karpathy/nanoGPT; without it, left out")
    parser.add_argument("--rounds", type=int, help="rounds of turns; default: each size's own")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    nanogpt = None if given.nanogpt is None else str(given.nanogpt.resolve())
    record: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(given.threads),
        "command": "python benchmarks/cpu_speed.py" + (" --nanogpt PATH" if nanogpt else ""),
        "parts": [],
    }
    for mode in ("eager", "compiled") if given.only is None else (given.only,):
        contestants = contestants_of(mode, with_nanogpt=nanogpt is not None)
        for name in given.sizes:
            size = SIZES[name]
            rounds = given.rounds or size.rounds
            results = measure(contestants, size, nanogpt, rounds)
            part = {
                "name": name,
                "mode": mode,
                "size": asdict(size),
                "rounds": rounds,
                "loss_difference": check_losses(contestants, results),
                "contestants": summary(contestants, size, results),
                "blocks": {who: [asdict(b) | {"losses": None} for b in blocks] for who, blocks in results.items()},
            }
            record["parts"].append(part)
            if given.output is not None:
                _keep(given.output, record, given.only)
    print(report(record))


def _keep(folder: Path, record: dict[str, Any], only: str | None) -> None:
    """Write what there is by now: a part that fails loses none of those before it."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"cpu_speed{'-' + only if only else ''}-{record['date']}"
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report(record))


if __name__ == "__main__":
    main()
