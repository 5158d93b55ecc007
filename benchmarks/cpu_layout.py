#!/usr/bin/env python3
"""Measures how much of one CPU process's speed 8 processes keep, as TP2 x PP2 x VPP2 x DP2.

    python benchmarks/cpu_layout.py --output benchmarks/results
    python benchmarks/cpu_layout.py --layout "--tensor-model-parallel-size 2" --ranks 2     # another layout

The quickstart's model and batch, on made-up text: one process with --threads threads, the layout with one thread a
rank. Both train by the real loop with its callbacks, and take turns in blocks of steps, each round in the other order.
The figures are medians over the rounds, of the ratios of neighbouring blocks: by the clock, which needs a machine
without other work, and by the processor time of all ranks. Losses of both must agree within 1e-5, or nothing is
reported. On a machine that others use as well, give --threads 1: two threads that spin for each other take the one
process several times its time.
"""

import argparse
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence, tell
from megatron_ext.forkserver.ranks import run_ranks

MODEL = (
    "--device cpu --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --ffn-hidden-size 352 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --seq-length 256 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 "
    "--lr 6e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --adam-beta2 0.95 "
    "--clip-grad 1.0 --mock-data --vocab-size 1024 --tokenizer-type NullTokenizer --eval-interval 0 --log-interval 1000"
)
TOKENS = 8 * 256
ONE = "--micro-batch-size 8"
LAYOUT = (
    "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--sequence-parallel-keep-gathered"
)
TOLERANCE = 1e-5
COMPARED = 10  # steps of the first block, which warms up and whose losses are compared


@dataclass(frozen=True)
class Block:
    """One turn."""

    seconds: float
    """Seconds of a step by the clock."""
    cpu_seconds: float
    """Processor seconds of a step, of all ranks together."""
    losses: list[float]


def train(address: str, flags: str, steps: int) -> None:
    """Train on this rank, in blocks of steps whose numbers come from `address`."""
    from megatron_ext import device
    from megatron_ext.train.configure import configure

    config = configure([*flags.split(), "--train-iters", str(steps)]).config
    here = device.install("cpu")
    import torch

    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.signals import SignalWatcher
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.standard import standard_callbacks
    from megatron_ext.train.step import StepResult
    from megatron_ext.train.trainer import Callback, Trainer

    run = build_run(config, here)
    pipe = Client(address) if run.rank == 0 else None

    class TakesTurns(Callback):
        left = length = 0
        began = 0.0, 0.0
        losses: list[float]

        def on_step_begin(self, trainer: Trainer) -> None:
            if self.left == 0:
                asked = torch.tensor(0 if pipe is None else pipe.recv())
                torch.distributed.broadcast(asked, 0)
                self.left = self.length = int(asked)
                self.losses = []
                self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
            self.losses.append(result.loss)
            self.left -= 1
            if self.left == 0:
                clock, cpu = self.began
                seconds = (time.perf_counter() - clock) / self.length
                used = torch.tensor((time.process_time() - cpu) / self.length, dtype=torch.float64)
                torch.distributed.all_reduce(used)
                if pipe is not None:
                    pipe.send(Block(seconds, used.item(), self.losses))

    with SignalWatcher(None) as signals:
        Trainer(run, [*standard_callbacks(run, signals, RunStatus(rank=run.rank)), TakesTurns()]).fit()
    run.loaders.close()


def run_or_end(count: int, address: str, flags: str, steps: int, threads: int) -> None:
    """Run `train` on ranks of their own; end the program when one fails, since nobody would answer the pipe then."""
    try:
        run_ranks(count, train, address, flags, steps, environment={"OMP_NUM_THREADS": str(threads)}, timeout=3600.0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def measure(ranks: int, threads: int, layout: str, rounds: int, block: int) -> tuple[list[Block], list[Block]]:
    """Return the blocks of one process and of the layout, the first ones to warm up."""
    steps = COMPARED + rounds * block
    pipes: list[Connection] = []
    works: list[threading.Thread] = []
    for count, flags, of_threads in ((1, f"{MODEL} {ONE}", threads), (ranks, f"{MODEL} {layout}", 1)):
        with Listener() as listener:
            work = threading.Thread(target=run_or_end, args=(count, listener.address, flags, steps, of_threads))
            work.start()
            works.append(work)
            pipes.append(listener.accept())
    blocks: tuple[list[Block], list[Block]] = [], []
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            pipes[which].send(block if number else COMPARED)
            blocks[which].append(pipes[which].recv())
    for work in works:
        work.join()
    return blocks


def summary(one: Sequence[Block], many: Sequence[Block], ranks: int, threads: int) -> dict[str, Any]:
    """Return medians over the blocks after the first.

    Raises:
        SystemExit: the losses differ.
    """
    distance = max(abs(a - b) for a, b in zip(one[0].losses, many[0].losses, strict=True))
    if not distance <= TOLERANCE:
        sys.exit(f"the losses differ by {distance:.2e}, more than {TOLERANCE}: not the same training")
    one, many = one[1:], many[1:]
    found: dict[str, Any] = {"loss_difference": distance, "rounds": len(one)}
    for name, blocks in ((f"one process, threads: {threads}", one), (f"{ranks} processes", many)):
        seconds = statistics.median(block.seconds for block in blocks)
        cpu = statistics.median(block.cpu_seconds for block in blocks)
        found[name] = {"ms": 1000 * seconds, "cpu_ms": 1000 * cpu, "tokens_per_second": TOKENS / seconds}
    pairs = list(zip(one, many, strict=True))
    found["kept"] = statistics.median(a.seconds / b.seconds for a, b in pairs)
    found["kept_by_cpu_time"] = statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs)
    return found


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    found = record["found"]
    lines = [
        f"# {record['ranks']} CPU processes against one, {record['date']}",
        "",
        sentence(record),
        "",
        f"{found['rounds']} rounds of {record['block']} steps in turns; `{record['layout']}`. Largest difference of "
        f"the losses over {COMPARED} steps: {found['loss_difference']:.1e}.",
        "",
        "| | ms a step | CPU ms a step | tokens/s |",
        "|---|---|---|---|",
    ]
    for name, row in found.items():
        if isinstance(row, dict):
            lines.append(f"| {name} | {row['ms']:.1f} | {row['cpu_ms']:.1f} | {row['tokens_per_second']:,.0f} |")
    lines += ["", f"Kept: {found['kept']:.3f} by the clock, {found['kept_by_cpu_time']:.3f} by processor time."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default=LAYOUT, help="flags of the layout, with its micro-batch size")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2, help="threads of the one process")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=10, help="steps of a turn")
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()

    record: dict[str, Any] = heading() | {"layout": given.layout, "ranks": given.ranks, "block": given.block}
    one, many = measure(given.ranks, given.threads, given.layout, given.rounds, given.block)
    record["found"] = summary(one, many, given.ranks, given.threads)
    tell(given.output, "cpu_layout", record, report(record))


if __name__ == "__main__":
    main()
