"""Counts what --log-straggler says in a real training of a small model on CPU ranks, and measures what it costs.

    python benchmarks/stragglers.py                  # no rank is slowed: nobody is to be named
    python benchmarks/stragglers.py --taken          # a core is taken for about a second, often
    python benchmarks/stragglers.py --slowed 1.3     # rank 1 computes that much longer
    python benchmarks/stragglers.py --cost           # processor seconds, as a share of a step

Each run becomes a row of the day's file in --output. A slowed rank spins after each step, from --slowed-from on, for
as long as its processor took for the step, times the factor minus one. What takes a core are programs that spin for 0.7
to 1.6 s, one at a time, on a core by chance, 3 to 9 s apart. Other work on the machine is no mistake of such a run: it
is what the rule must stand. The load is in the record, with the share of a core that each rank had while it computed.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import watch
from benchmarks.recording import heading, keep
from megatron_ext.forkserver.ranks import run_ranks

TAKES = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
SLOWED_RANK = 1


def trained(steps: int, factor: float, slowed_from: int) -> dict[str, Any]:
    """Train on this rank, and return what was said, with milliseconds of a step."""
    from megatron_ext.plugins.rank_times.communication_clock import CommunicationClock, ComputeTime
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.train.trainer import Trainer

    times: list[ComputeTime] = []
    seconds: list[float] = []
    take, step = CommunicationClock.take_compute, Trainer.begin_step
    rank = int(os.environ["RANK"])

    def taken(self: CommunicationClock) -> list[ComputeTime]:
        found = take(self)
        times.extend(found)
        return found

    def slowed(self: Trainer) -> Any:
        began, clock = time.thread_time(), time.perf_counter()
        result = step(self)
        if factor > 1.0 and rank == SLOWED_RANK and self.run.state.iteration >= slowed_from:
            now = time.thread_time()
            until = now + (factor - 1.0) * (now - began)
            while time.thread_time() < until:
                pass
        seconds.append(time.perf_counter() - clock)
        return result

    CommunicationClock.take_compute, Trainer.begin_step = taken, slowed
    words = [*watch.SMALL.split(), *watch.WATCHED.split(), "--train-iters", str(steps)]
    printed = watch._trained(words, RunStatus(rank=rank))
    return {
        "lines": [line for line in printed.splitlines() if line.startswith("straggler at")],
        "times": times,
        "milliseconds_of_a_step": 1000.0 * median(seconds),
        "milliseconds_computed": 1000.0 * median(one.seconds for one in times),
        "of_these_its_own": 1000.0 * median(one.own for one in times),
    }


@contextmanager
def a_core_is_taken(often: bool) -> Iterator[list[float]]:
    """Take a core now and then, if `often`; yield a list of for how many seconds, which grows."""
    ended, taken, chance = threading.Event(), [], random.Random(7)

    def take() -> None:
        cores = sorted(os.sched_getaffinity(0))
        while not ended.wait(chance.uniform(3.0, 9.0)):
            core, seconds = chance.choice(cores), chance.uniform(0.7, 1.6)
            process = subprocess.Popen([sys.executable, "-S", "-c", TAKES, str(seconds)])
            os.sched_setaffinity(process.pid, [core])
            process.wait()
            taken.append(seconds)

    thread = threading.Thread(target=take)
    if often:
        thread.start()
    try:
        yield taken
    finally:
        ended.set()
        if often:
            thread.join()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train on ranks, and return a row."""
    with a_core_is_taken(options.taken) as taken:
        ranks = run_ranks(options.ranks, trained, options.steps, options.slowed, options.slowed_from, timeout=3600.0)
    if options.times is not None:
        options.times.write_text(json.dumps([found["times"] for found in ranks]))
    lines = ranks[-1]["lines"]
    named = [re.match(r"straggler at iteration (\d+): rank (\d+) .* times as long as", line) for line in lines]
    slowed = f"rank {SLOWED_RANK} {options.slowed} times from step {options.slowed_from}"
    return {
        "steps": options.steps,
        "slowed": slowed if options.slowed > 1.0 else "",
        "core_taken": f"{len(taken)} times, {sum(taken):.0f} s" if options.taken else "",
        "named": [f"rank {found[2]} at {found[1]}" for found in named if found],
        "milliseconds_of_a_step": max(found["milliseconds_of_a_step"] for found in ranks),
        "share_of_a_core": [round(found["of_these_its_own"] / found["milliseconds_computed"], 2) for found in ranks],
        "lines": lines,
    }


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the check's processor seconds in watch.py's training, and return a row."""
    (collective,) = run_ranks(1, watch.seconds_of_a_collective)
    seen = run_ranks(options.ranks, watch.training, options.steps, timeout=3600.0)[-1]
    return {
        "steps": options.steps,
        "processor_seconds_of_a_step": seen["seconds_of_a_step"],
        "share_of_a_step": watch.straggler_share(collective, seen),
    }


def table(record: dict[str, Any]) -> str:
    """Return the day's rows in Markdown."""
    lines = [f"# What --log-straggler says and costs, {record['date']}", ""]
    lines += [*(line.strip() for line in (__doc__ or "").strip().split("\n")[7:]), ""]
    lines += ["| load before | commit | steps | slowed | core taken | ms of a step | ranks had of a core | named |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in record["runs"]:
        if "named" in row:
            had = ", ".join(f"{share:.0%}" for share in row["share_of_a_core"])
            cells = [row["steps"], row["slowed"], row["core_taken"], f"{row['milliseconds_of_a_step']:.0f}", had]
            cells.append("; ".join(row["named"]) or "nobody")
            lines.append(f"| {row['load']} | {row['commit']} | {' | '.join(map(str, cells))} |")
    for row in record["runs"]:
        if "share_of_a_step" in row:
            lines += ["", f"The check took {row['share_of_a_step']:.3%} of the processor seconds of a step of "]
            lines[-1] += f"{row['processor_seconds_of_a_step']:.2f} s (load {row['load']} before, {row['commit']})."
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print, and add to the day's file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--slowed", type=float, default=1.0, help="by which factor rank 1 computes longer")
    parser.add_argument("--slowed-from", type=int, default=50, help="step")
    parser.add_argument("--taken", action="store_true", help="take a core for about a second now and then")
    parser.add_argument("--cost", action="store_true", help="measure what it costs instead; 40 steps are enough")
    parser.add_argument("--times", type=Path, help="file for each rank's [seconds, own seconds] of each step")
    parser.add_argument("--output", type=Path, help="folder to keep the results in")
    options = parser.parse_args()
    about = heading()
    row = {"load": about["machine"]["load_average"], "commit": about["commit"]}
    row |= cost(options) if options.cost else run(options)
    print(json.dumps(row, indent=1))
    if options.output is not None:
        file = options.output / f"stragglers-{about['date']}.json"
        runs = json.loads(file.read_text())["runs"] if file.exists() else []
        record = {"date": about["date"], "machine": about["machine"], "runs": [*runs, row]}
        keep(options.output, "stragglers", record, table(record))


if __name__ == "__main__":
    main()
