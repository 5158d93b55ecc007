"""Measures what the watch over hangs costs a training on CPU ranks.

    python benchmarks/watch.py

Two parts, on as many processes as --ranks, one thread each:

    mark        seconds of one marked collective and its wait, minus those of the plain one: a stand-in for the backend
                that returns at once, so that nothing but the marks is measured
    heartbeat   processor seconds that the watch's threads take in a second, over a real store with all ranks

A step's share follows from both: marks x collectives in a step / step time + heartbeat. The collectives in a step are
counted in a real training of the flags below.
"""

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.verify.ranks import run_ranks

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8000 --eval-interval 0 "
    "--log-interval 1 --train-iters 12 --use-distributed-optimizer --device cpu"
)
CALLS = 200_000
SECONDS = 20.0


def seconds_of_a_mark() -> float:
    """Return what marking a collective and its wait costs, in seconds."""
    from torch.distributed import ProcessGroup, Work

    from megatron_ext.resilience.operation_marks import OperationMarks
    from megatron_ext.resilience.progress import Progress

    work = Work()
    group = ProcessGroup(0, 1)
    marks = OperationMarks(Progress())
    reduce = marks._marked("allreduce", 1, lambda group: work)
    wait = marks._marked_wait(lambda work: True)
    return _each(lambda: wait(reduce(group))) - _each(lambda: work)


def _each(call: Any) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS


def heartbeat() -> float:
    """Return processor seconds per second of a rank that does nothing but be watched."""
    import torch

    from megatron_ext import device
    from megatron_ext.parallel import meeting
    from megatron_ext.resilience.board import Board
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.watch import Watch

    device.install("cpu")
    store, rank, ranks = meeting.meet(timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    watch = Watch(RunStatus(rank=rank), 600.0, Board(store.clone(), rank, ranks), lambda group: ("", "", ()))
    watch.start()
    torch.distributed.barrier()
    before = time.process_time()
    time.sleep(SECONDS)
    used = (time.process_time() - before) / SECONDS
    torch.distributed.barrier()
    watch.close()
    return used


def training() -> tuple[float, float]:
    """Return seconds of a step and collectives in one, of a real run."""
    import os

    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.progress import Progress
    from megatron_ext.train.trainer import Trainer
    from pretrain_gpt import main

    seconds: list[float] = []
    counts: list[int] = []
    step = Trainer.step
    status = RunStatus(rank=int(os.environ["RANK"]), progress=Progress())

    def timed_step(self: Trainer) -> Any:
        began, before = time.perf_counter(), sum(status.progress.counts.values())
        result = step(self)
        seconds.append(time.perf_counter() - began)
        counts.append(sum(status.progress.counts.values()) - before)
        return result

    Trainer.step = timed_step
    main(FLAGS.split(), status)
    middle = sorted(range(2, len(seconds)), key=seconds.__getitem__)[len(seconds[2:]) // 2]
    return seconds[middle], float(counts[middle])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    (mark,) = run_ranks(1, seconds_of_a_mark)
    beats = max(run_ranks(ranks, heartbeat))
    step, collectives = run_ranks(ranks, training)[0]
    record = {
        "ranks": ranks,
        "microseconds_of_a_mark": 1e6 * mark,
        "heartbeat_share_of_a_core": beats,
        "seconds_of_a_step": step,
        "collectives_in_a_step": collectives,
        "share_of_a_step": mark * collectives / step + beats,
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
