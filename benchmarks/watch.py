"""Measures what watching a training costs it on CPU ranks: hangs, slow ranks, copies of weights.

    python benchmarks/watch.py --ranks 2 --steps 1000

Four parts, on as many processes as --ranks, one thread each:

    mark, clock seconds of one marked (--log-straggler: timed) collective and its wait, minus those of the plain one: a
                stand-in for the backend that returns at once, so that nothing else is measured
    heartbeat   processor seconds that the watch's threads take in a second, over a real store with all ranks

    straggler   seconds that --log-straggler takes at the end of a step (the median of every fourth, and of the others),
                and how many ranks it flags in a real training of so many steps, where none is slow
    replicas    seconds of one comparison of all weights between data-parallel replicas, in the same training

The watch's share of a step follows from the first two: marks x collectives in a step / step time + heartbeat. The
collectives in a step are counted in the training.
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
    "--log-interval 1 --use-distributed-optimizer --device cpu "
    "--log-straggler --check-weight-hash-across-dp-replicas-interval 5"
)
CALLS = 200_000
SECONDS = 20.0


def seconds_of_a_collective() -> dict[str, float]:
    """Return what marking and what timing a collective and its wait cost, in seconds."""
    from torch.distributed import ProcessGroup, Work

    from megatron_ext.device.cpu import CpuDevice
    from megatron_ext.resilience.operation_marks import OperationMarks
    from megatron_ext.resilience.progress import Progress
    from megatron_ext.telemetry.communication import CommunicationClock

    work = Work()
    group = ProcessGroup(0, 1)
    marks, clock = OperationMarks(Progress()), CommunicationClock(CpuDevice(), None)
    clock.begin_step()
    begin, end = marks._marked("allreduce", 1, lambda group: work), marks._marked_wait(lambda work: True)
    timed_begin = clock._timed_operation("allreduce")(lambda group: work)
    timed_end = clock._timed_wait(lambda work: True)
    plain = _each(lambda: work)
    return {
        "mark": _each(lambda: end(begin(group))) - plain,
        "clock": _each(lambda: timed_end(timed_begin(group))) - plain,
    }


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


def training(steps: int) -> dict[str, float]:
    """Return what a real run shows, on this rank."""
    import contextlib
    import io
    import os
    from statistics import median

    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.train.callbacks import replicas
    from megatron_ext.train.callbacks.stragglers import Stragglers
    from megatron_ext.train.trainer import Trainer
    from pretrain_gpt import main

    status = RunStatus(rank=int(os.environ["RANK"]))
    seconds: dict[str, list[float]] = {}
    counts: list[int] = []

    def timed(name: str, function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began, before = time.perf_counter(), sum(status.progress.counts.values())
            result = function(*args, **kwargs)
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            if name == "step":
                counts.append(sum(status.progress.counts.values()) - before)
            return result

        return wrapped

    Trainer.step = timed("step", Trainer.step)
    Stragglers.on_step_end = timed("straggler", Stragglers.on_step_end)
    replicas.check_data_parallel_replicas = timed("replicas", replicas.check_data_parallel_replicas)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main([*FLAGS.split(), "--train-iters", str(steps)], status)
    exchanges, others = seconds["straggler"][3::4], [s for i, s in enumerate(seconds["straggler"]) if i % 4 != 3]
    return {
        "seconds_of_a_step": median(seconds["step"][2:]),
        "collectives_in_a_step": median(counts[2:]),
        "straggler_seconds_of_a_step": (median(exchanges) + 3 * median(others)) / 4,
        "ranks_flagged": output.getvalue().count("times as long as its peers"),
        "seconds_of_a_replica_check": median(seconds["replicas"]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of the training")
    options = parser.parse_args()
    ranks = options.ranks
    (collective,) = run_ranks(1, seconds_of_a_collective)
    beats = max(run_ranks(ranks, heartbeat))
    seen = run_ranks(ranks, training, options.steps, timeout=3600.0)[-1]
    step, collectives = seen["seconds_of_a_step"], seen["collectives_in_a_step"]
    record = {
        "ranks": ranks,
        "microseconds_of_a_mark": 1e6 * collective["mark"],
        "microseconds_of_the_clock": 1e6 * collective["clock"],
        "heartbeat_share_of_a_core": beats,
        **seen,
        "watch_share_of_a_step": collective["mark"] * collectives / step + beats,
        "straggler_share_of_a_step": (collective["clock"] * collectives + seen["straggler_seconds_of_a_step"]) / step,
        "replica_check_share_of_a_step": seen["seconds_of_a_replica_check"] / step,
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
