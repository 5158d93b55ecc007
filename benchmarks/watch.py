"""Measures what watching a training costs it on CPU ranks: hangs, slow ranks, copies of weights, data; and its stops.

    python benchmarks/watch.py --ranks 2 --output benchmarks/results

On as many processes as --ranks, one thread each. All shares are of processor seconds (of all threads of a process), so
that other work on the machine changes them little; what a step waits for on its clock is given for the snapshot.

    mark, clock one marked (--log-straggler: timed) collective and its wait, minus the plain ones: a stand-in for the
                backend that returns at once, so that nothing else is measured
    heartbeat   what the watch's two threads take in a second, over a real store with all ranks (of the rank's other
                threads gloo's takes more: it looks a hundred times a second)
    straggler   what --log-straggler takes at the end of a step (the median of every second, and of the others), and how
                many ranks it flags in 1,000 steps of a smaller model, where none is slow (benchmarks/stragglers.py
                does more of these)
    replicas    one comparison of all weights between data-parallel replicas, in the same training
    data        what --verify-data background takes in a second, of all ranks
    snapshot    how long a step stops for one of --non-persistent-save-interval, and how long a copy of the same tensors
                takes, in a training of a larger model
    stop        seconds from SIGTERM to the end of all processes, which saved, with --exit-signal-deadline, and the
                clock seconds of a step of that training

The watch's share of a step follows from the first two: marks x collectives in a step / step + heartbeat. The
collectives in a step are counted in the training.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launchers import ForkedRanks
from benchmarks.recording import heading, keep, sentence
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.silent_errors.rules import STEPS_BETWEEN_REPLICA_CHECKS

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8000 --eval-interval 0 "
    "--log-interval 1 --use-distributed-optimizer --device cpu "
)
SMALL = "--num-layers 2 --hidden-size 64 --seq-length 64 --global-batch-size 8"
FLAGGED_STEPS = 1000
WATCHED = "--log-straggler --check-weight-hash-across-dp-replicas-interval 5"
LARGE = "--hidden-size 1024 --seq-length 32 --micro-batch-size 1 --global-batch-size 2"
SNAPSHOTS = "--non-persistent-save-interval 2 --non-persistent-ckpt-type local --train-iters 8"
CALLS = 200_000
SECONDS = 20.0
DEADLINE = 25


def seconds_of_a_collective() -> dict[str, float]:
    """Return what marking and what timing a collective and its wait cost, in seconds."""
    import torch
    from torch.distributed import Work

    from megatron_ext.device.cpu import CpuDevice
    from megatron_ext.plugins.rank_times.communication_clock import CommunicationClock
    from megatron_ext.resilience.progress import Progress
    from megatron_ext.train.start_watchdog import OperationMarks

    work = Work()
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
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
    began = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - began) / CALLS


def heartbeat() -> float:
    """Return processor seconds per second of the watch's threads, in a rank that does nothing else."""
    import torch

    from megatron_ext import device
    from megatron_ext.parallel import rendezvous
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.rank_reports import Board
    from megatron_ext.resilience.watchdog import Watch

    device.install("cpu")
    store, rank, ranks = rendezvous.meet(timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    watch = Watch(RunStatus(rank=rank), 600.0, Board(store.clone(), rank, ranks), lambda group: ("", "", ()))
    watch.start()
    torch.distributed.barrier()
    before = _seconds_of(watch._threads)
    time.sleep(SECONDS)
    used = _seconds_of(watch._threads) - before
    torch.distributed.barrier()
    watch.close()
    return used / SECONDS


def _seconds_of(threads: Iterable[threading.Thread]) -> float:
    """Return the processor seconds of threads of this process, by the scheduler's count."""
    files = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in threads]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def data_check(file: str, blocks: int, size: int) -> float:
    """Return processor seconds per second of a rank that does nothing but compare data with its checksums."""
    from megatron_ext import environment
    from megatron_ext.data.data_manifest import BackgroundCheck, Block

    found = [Block(file, number * size, size, f"{0:08x}") for number in range(blocks)]  # compared at the block's end
    check = BackgroundCheck(found, processes=environment.local_world_size())
    used = _used_while_asleep()
    check.close()
    return used


def _used_while_asleep() -> float:
    before = time.process_time()
    time.sleep(SECONDS)
    return (time.process_time() - before) / SECONDS


def training(steps: int) -> dict[str, float]:
    """Return what a real run shows, on this rank."""
    from statistics import median

    from megatron_ext.plugins.rank_times.measures import Stragglers
    from megatron_ext.plugins.silent_errors import replicas
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.train.trainer import Trainer

    status = RunStatus(rank=int(os.environ["RANK"]))
    seconds: dict[str, list[float]] = {}
    counts: list[int] = []

    def counted(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before = sum(status.progress.counts.values())
            result = function(*args, **kwargs)
            counts.append(sum(status.progress.counts.values()) - before)
            return result

        return wrapped

    Trainer.begin_step = counted(_timed("step", Trainer.begin_step, seconds))
    Stragglers.on_step_end = _timed("straggler", Stragglers.on_step_end, seconds)
    replicas.check_data_parallel_replicas = _timed("replicas", replicas.check_data_parallel_replicas, seconds)
    _trained([*WATCHED.split(), "--train-iters", str(steps)], status)
    exchanges, others = seconds["straggler"][1::2], seconds["straggler"][::2]
    return {
        "seconds_of_a_step": median(seconds["step"][2:]),
        "collectives_in_a_step": median(counts[2:]),
        "straggler_seconds_of_a_step": (median(exchanges) + median(others)) / 2,
        "seconds_of_a_replica_check": median(seconds["replicas"]),
    }


def straggler_share(collective: Mapping[str, float], seen: Mapping[str, float]) -> float:
    """Return which share of a step's processor seconds --log-straggler takes: its clock and its exchange."""
    clock = collective["clock"] * seen["collectives_in_a_step"]
    return (clock + seen["straggler_seconds_of_a_step"]) / seen["seconds_of_a_step"]


def flagged() -> int:
    """Return how many times this rank says that one is slow, in a real training where none is."""
    from megatron_ext.resilience.process_end import RunStatus

    words = [*SMALL.split(), *WATCHED.split(), "--train-iters", str(FLAGGED_STEPS)]
    return _trained(words, RunStatus(rank=int(os.environ["RANK"]))).count("times as long as its peers")


def snapshots(folder: str) -> dict[str, float]:
    """Return how long steps of a real run stop for a snapshot, and how long plain copies of its tensors take."""
    from statistics import median

    from megatron_ext.plugins.snapshots import writer
    from megatron_ext.plugins.snapshots.take import Snapshots
    from megatron_ext.plugins.snapshots.writer import SnapshotWriter
    from megatron_ext.resilience.process_end import RunStatus

    seconds: dict[str, list[float]] = {}
    take = _timed("take", SnapshotWriter.take, seconds, clock=time.perf_counter)
    places: dict[str, Any] = {}

    def copied(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            places.setdefault(name, tensor.clone()).copy_(tensor)

    copy = _timed("copy", copied, seconds, clock=time.perf_counter)

    def take_and_copy(self: SnapshotWriter) -> float:
        stopped = take(self)
        self.join()  # or the copy would share the memory's bandwidth with the writing
        with self.run.gathered_parameters():
            copy(writer.tensors_of(self.run))
        return stopped

    def whole(self: Snapshots, *args: Any) -> None:
        before = len(seconds.get("take", []))
        step_end(self, *args)
        if len(seconds.get("take", [])) > before:
            bytes_of_a_snapshot.append(float(self._writer.bytes))

    hook: Any = whole
    step_end, Snapshots.on_step_end = Snapshots.on_step_end, hook
    SnapshotWriter.take = take_and_copy
    bytes_of_a_snapshot: list[float] = []
    paths = ["--save", f"{folder}/save", "--load", f"{folder}/save"]
    memory = ["--non-persistent-local-ckpt-dir", f"{folder}/memory"]
    _trained([*LARGE.split(), *SNAPSHOTS.split(), *paths, *memory], RunStatus(rank=int(os.environ["RANK"])))
    return {
        "megabytes_of_a_snapshot": bytes_of_a_snapshot[-1] / 1e6,
        "clock_seconds_a_step_stops": median(seconds["take"][1:]),
        "clock_seconds_of_a_copy": median(seconds["copy"][1:]),
    }


def stop(ranks: int, folder: Path) -> dict[str, float]:
    """Return how long a run takes to save and end after SIGTERM."""
    from statistics import median

    from megatron_ext.untrusted.metrics_rows import read_rows

    save = folder / "save"
    words = [*FLAGS.split(), "--save", str(save), "--train-iters", "1000", "--exit-signal-deadline", str(DEADLINE)]
    launched = ForkedRanks(words, ranks, folder / "log")
    try:
        launched.start()
        _wait_for(lambda: (save / "metrics.jsonl").exists() and len(list(read_rows(save / "metrics.jsonl"))) > 2)
        began = time.monotonic()
        codes = launched.stop(2.0 * DEADLINE)
        taken = time.monotonic() - began
    finally:
        launched.end()
    if set(codes) != {75}:
        raise RuntimeError(f"exit codes {codes} instead of 75:\n{launched.end_of_log()}")
    rows = list(read_rows(save / "metrics.jsonl"))
    saved = int((save / "latest_checkpointed_iteration.txt").read_text())
    return {
        "clock_seconds_from_sigterm_to_the_end": taken,
        "clock_seconds_of_a_step": median(row["elapsed_ms"] for row in rows) / 1000.0,
        "steps_lost_by_the_stop": rows[-1]["iteration"] - saved,
    }


def _wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240.0
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError("the training does not get on")
        time.sleep(0.02)


def _timed(name: str, function: Any, seconds: dict[str, list[float]], clock: Any = time.process_time) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        result = function(*args, **kwargs)
        seconds.setdefault(name, []).append(clock() - began)
        return result

    return wrapped


def _trained(flags: list[str], status: Any) -> str:
    """Train, and return what was printed."""
    import contextlib
    import io

    from pretrain_gpt import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main([*FLAGS.split(), *flags], status)
    return output.getvalue()


def _note(record: dict[str, Any], found: Mapping[str, float]) -> None:
    """Add to the record, and print it: a part takes minutes where there is other work."""
    record.update(found)
    print(json.dumps(found, indent=2), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of the training")
    parser.add_argument("--output", type=Path, help="folder to keep the results in")
    options = parser.parse_args()
    about, ranks = heading(), options.ranks
    (collective,) = run_ranks(1, seconds_of_a_collective)
    record: dict[str, Any] = {"ranks": ranks}
    _note(record, {f"microseconds_of_the_{name}": 1e6 * value for name, value in collective.items()})
    _note(record, {"heartbeat_share_of_a_core": max(run_ranks(ranks, heartbeat))})
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), 1 << 28
        with open(folder / "data", "wb") as file:
            for _ in range(size >> 24):
                file.write(os.urandom(1 << 24))
        compared = sum(run_ranks(ranks, data_check, str(folder / "data"), 1, size))
        _note(record, {"data_check_share_of_a_core_all_ranks": compared})
        stopped = run_ranks(ranks, snapshots, name, timeout=3600.0)
        _note(record, max(stopped, key=lambda found: found["clock_seconds_a_step_stops"]))
        _note(record, stop(ranks, folder / "stop"))
    seen = run_ranks(ranks, training, options.steps, timeout=3600.0)[-1]
    step, marks = seen["seconds_of_a_step"], collective["mark"] * seen["collectives_in_a_step"]
    check = seen["seconds_of_a_replica_check"] / step
    _note(record, seen)
    _note(record, {f"flagged_in_{FLAGGED_STEPS}_steps": run_ranks(ranks, flagged, timeout=3600.0)[-1]})
    shares = {
        "watch_share_of_a_step": marks / step + record["heartbeat_share_of_a_core"],
        "straggler_share_of_a_step": straggler_share(collective, seen),
        "replica_check_share_of_its_step": check,
        "replica_check_share_by_default": check / STEPS_BETWEEN_REPLICA_CHECKS,
    }
    _note(record, shares)
    rows = [f"| {key.replace('_', ' ')} | {value:.3g} |" for key, value in record.items()]
    record |= about
    if options.output is not None:
        text = ["# What watching costs", "", sentence(record), "", "| | |", "|---|---|", *rows, ""]
        keep(options.output, "watch", record, "\n".join(text))


if __name__ == "__main__":
    main()
