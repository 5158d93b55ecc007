"""Kills a training at random, over and over, and compares its end, to the bit, with one that nobody touched.

    trial = run_trial(("DP2", "save"), folder, expected, random.Random(1), kills=10, launcher="forkserver")

A trial is one training of a tiny model from its first step to its last. A launcher starts its ranks again after every
kill, as torchrun does: either torchrun itself, whose agent is killed too, or a server that forks them with torch
loaded, which is cheaper, so that many kills fit a day. Losses, norms and all other metrics of every step
and the tensors of the last checkpoint must then be those of the reference. Where the number of ranks changes from
start to start, the order of sums changes too, and the metrics of every step must be the reference's within 1e-6.
"""

import contextlib
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.launchers import LAUNCHERS, Launcher
from megatron_ext.telemetry.metrics import MEASURED_FIELDS
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.losses.run import tensor_hashes

STEPS, SAVED_EVERY = 40, 3
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 "
    "--lr-warmup-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 8 "
    f"--eval-interval 20 --eval-iters 1 --log-interval 1 --save-interval {SAVED_EVERY} --keep-last-checkpoints 3 "
    "--device cpu"
)
_STUCK = 240.0  # seconds in which the ranks must say something


@dataclass(frozen=True)
class Case:
    """A layout that is trained."""

    ranks: int
    flags: str = ""
    smaller: tuple[int, ...] = ()
    """Fewer ranks that it can go on with: those of another data-parallel size."""


@dataclass(frozen=True)
class Variant:
    """A way to save and to restart. `{folder}` in its flags is the training's folder, `{rank}` the rank."""

    flags: str = ""
    own_machines: bool = False
    """Whether each rank is on a machine of its own, as far as it knows, whose memory goes with it when it is killed."""
    elastic: bool = False
    """Whether the number of ranks changes from start to start."""


CASES = {
    "one rank": Case(1),
    "DP2": Case(2, smaller=(1,)),
    "DP2 distributed optimizer": Case(
        2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", smaller=(1,)
    ),
    "TP2": Case(2, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "PP2": Case(2, "--pipeline-model-parallel-size 2 --bf16"),
    "FSDP2": Case(2, "--use-torch-fsdp2", smaller=(1,)),
    "Megatron FSDP": Case(2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
    "PP2 DP2": Case(4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer", smaller=(2,)),
}
_SNAPSHOTS = "--save-interval 9 --non-persistent-save-interval 2 --non-persistent-ckpt-type local"
VARIANTS = {
    "save": Variant(),
    "async save": Variant("--async-save"),
    "snapshots": Variant(f"{_SNAPSHOTS} --non-persistent-local-ckpt-dir {{folder}}/memory"),
    "async save, snapshots": Variant(f"--async-save {_SNAPSHOTS} --non-persistent-local-ckpt-dir {{folder}}/memory"),
    "snapshots, lost machines": Variant(
        f"{_SNAPSHOTS} --replication --non-persistent-local-ckpt-dir {{folder}}/memory{{rank}}", own_machines=True
    ),
    # Data-parallel ranks draw masks of their own.
    "elastic": Variant("--attention-dropout 0 --hidden-dropout 0", elastic=True),
}
TOLERANCE = 1e-6
"""Relative difference up to which the metrics of an elastic training are those of its reference."""


def combinations(launcher: str) -> list[tuple[str, str]]:
    """Return the pairs of keys of `CASES` and `VARIANTS` that the launcher can run."""
    forked = not LAUNCHERS[launcher].has_agent
    return [
        (layout, name)
        for layout, case in CASES.items()
        for name, variant in VARIANTS.items()
        if not ((variant.elastic and not (forked and case.smaller)) or (variant.own_machines and not forked))
        if not (variant.own_machines and case.ranks == 1)
    ]


KINDS = ("a step", "a save", "recovery", "recovery, twice", "two ranks", "the agent")
"""When, or what, is killed. The agent is torchrun's alone."""


@dataclass
class Kill:
    """One kill, and what became of it."""

    kind: str
    ranks: list[int]
    at: int
    """Last iteration that was logged before the kill."""
    resumed_at: int | None = None
    """Iteration at which the run went on; None where the next kill came before."""
    seconds: float | None = None
    """From the kill to the first step after it; None as above."""
    late: int = 0
    """Number of ranks that the launcher had to kill in the end."""
    of: int | None = None
    """Number of ranks that were there."""

    @property
    def lost(self) -> int | None:
        """Number of steps that were done once more."""
        return None if self.resumed_at is None else max(0, self.at - self.resumed_at)


@dataclass
class Trial:
    """One training with its kills."""

    layout: str
    variant: str
    launcher: str
    seconds: float = 0.0
    useful: float = 0.0
    """Seconds that the steps take which nobody interrupts."""
    kills: list[Kill] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """What is not as in the run that was not killed; empty where all is equal to the bit (elastic: within 1e-6)."""
    largest: float | None = None
    """Largest relative difference of a metric; None where all must be equal to the bit."""
    seed: int | None = None
    """Seed of what was drawn."""

    def as_row(self) -> dict[str, Any]:
        """Return it for a file of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Reference:
    """What an untouched training left."""

    rows: list[dict[str, Any]]
    tensors: dict[str, str]
    useful: float


class StuckError(AssertionError):
    """Raised where a run does not get on, or ends early."""


def words(case: Case, variant: Variant, folder: Path, steps: int) -> list[str]:
    """Return the flags of a training that saves into the folder `save` of `folder`."""
    paths = ["--save", f"{folder}/save", "--load", f"{folder}/save"]
    flags = [word.replace("{folder}", str(folder)) for word in variant.flags.split()]
    return [*FLAGS.split(), *case.flags.split(), "--train-iters", str(steps), *paths, *flags]


def reference(case: Case, folder: Path, steps: int = STEPS, *, elastic: bool = False) -> Reference:
    """Train the case untouched, in `folder`, for trials of elastic variants or of all others."""
    variant = VARIANTS["elastic" if elastic else "save"]
    launcher = LAUNCHERS["forkserver"](words(case, variant, folder, steps), case.ranks, folder / "log")
    try:
        launcher.start()
        _wait(lambda: launcher.finished(), launcher)
    finally:
        launcher.end()
    rows = [row for row in read_rows(folder / "save" / "metrics.jsonl") if "lm_loss" in row]
    step = statistics.median(row["elapsed_ms"] for row in rows[2:]) / 1000.0
    return Reference(*_left(folder / "save", steps), step * steps)


def _left(save: Path, steps: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the metrics that a repetition must have, and the hashes of all tensors of the last checkpoint."""
    rows = [
        {name: value for name, value in row.items() if name not in MEASURED_FIELDS}
        for row in read_rows(save / "metrics.jsonl")
    ]
    return rows, dict(tensor_hashes(save / f"iter_{steps:07d}"))


def run_trial(
    names: tuple[str, str],
    folder: Path,
    expected: Reference,
    draw: random.Random,
    *,
    kills: int,
    steps: int = STEPS,
    launcher: str = "torchrun",
) -> Trial:
    """Train once with up to `kills` kills and compare.

    Args:
        names: keys of `CASES` and `VARIANTS`.
        folder: a new folder, for the checkpoints and logs.
        expected: what the case leaves without kills.
        draw: says when and what is killed.
        steps: number of steps, the reference's.
        launcher: key of `LAUNCHERS`, one that `combinations` has these names for.
    Raises:
        StuckError: the run does not go on after a kill.
    """
    case, variant = CASES[names[0]], VARIANTS[names[1]]
    save = folder / "save"
    ranks = LAUNCHERS[launcher](words(case, variant, folder, steps), case.ranks, folder / "log")
    ranks.lost_with_rank = f"{folder}/memory{{rank}}" if variant.own_machines else None
    sizes = (*case.smaller, case.ranks) if variant.elastic else (case.ranks,)
    trial = Trial(*names, launcher, useful=expected.useful)
    began = time.monotonic()
    try:
        ranks.start()
        for strike in _strikes(ranks, save, draw, sizes):
            trial.kills += strike
            if len(trial.kills) >= kills:
                break
        _wait(lambda: ranks.finished(), ranks)
    finally:
        ranks.end()
    trial.seconds = time.monotonic() - began
    left = _left(save, steps)
    if variant.elastic:
        trial.largest, trial.differences = largest_difference(left[0], expected.rows)
    else:
        trial.differences = differences(left, expected)
    return trial


def differences(left: tuple[list[dict[str, Any]], dict[str, str]], expected: Reference) -> list[str]:
    """Return what is not as it was in the reference, in words."""
    rows, tensors = left
    found = [
        f"row {number}: {name} {before.get(name)} became {after.get(name, 'nothing')}"
        for number, (before, after) in enumerate(zip(expected.rows, rows, strict=False), 1)
        for name in before.keys() | after.keys()
        if before.get(name, "nothing") != after.get(name, "nothing")
    ]
    if len(rows) != len(expected.rows):
        found.append(f"{len(expected.rows)} rows became {len(rows)}")
    names = expected.tensors.keys() | tensors.keys()
    return found + [
        f"{name} of the last checkpoint" for name in names if expected.tensors.get(name) != tensors.get(name)
    ]


def largest_difference(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> tuple[float, list[str]]:
    """Return the largest relative difference of any metric, and what is further apart than `TOLERANCE`, in words.

    The number of ranks, which a row has too, may differ.
    """
    if len(rows) != len(expected):
        return math.inf, [f"{len(expected)} rows became {len(rows)}"]
    largest, found = 0.0, []
    for number, (before, after) in enumerate(zip(expected, rows, strict=True), 1):
        names = (before.keys() | after.keys()) - {"world_size"}
        apart = {name: _apart(before.get(name), after.get(name)) for name in names}
        largest = max(largest, *apart.values())
        found += [
            f"row {number}: {name} {before.get(name)} became {after.get(name)}"
            for name, difference in apart.items()
            if difference > TOLERANCE
        ]
    return largest, found


def _apart(before: Any, after: Any) -> float:
    """Return the relative difference of two metrics; infinity where they are no numbers, and not the same."""
    if before == after:
        return 0.0
    if isinstance(before, float) and isinstance(after, float):
        apart = abs(after - before) / max(abs(before), abs(after))
        return math.inf if math.isnan(apart) else apart
    return math.inf


def _strikes(launcher: Launcher, save: Path, draw: random.Random, sizes: Sequence[int]) -> Iterator[list[Kill]]:
    """Kill, let the launcher start again with a number of ranks out of `sizes`, and yield the kills, until the run is
    finished."""
    kinds = [kind for kind in KINDS if kind != "the agent" or launcher.has_agent]
    with contextlib.suppress(_Finished):
        while True:
            kind = draw.choice([kind for kind in kinds if launcher.ranks > 1 or kind != "two ranks"])
            _await_moment(kind, launcher, save, draw)
            began = time.monotonic()
            struck = [_kill(kind, launcher, save, draw, sizes)]
            for _ in range({"recovery": 1, "recovery, twice": 2}.get(kind, 0)):
                time.sleep(draw.uniform(0.0, launcher.typical_start))
                if launcher.finished():
                    break
                began = time.monotonic()
                struck.append(_kill("recovery", launcher, save, draw, sizes))
            struck[-1].at = max(kill.at for kill in struck)
            _await_resumption(struck[-1], began, launcher, save)
            yield struck


def _await_moment(kind: str, launcher: Launcher, save: Path, draw: random.Random) -> None:
    """Wait for a save to be in progress, or for some steps and a part of one."""
    target = last_iteration(save) + draw.randint(1, 2 * SAVED_EVERY)
    if kind == "a save":
        _wait(lambda: _saves(save) or last_iteration(save) >= target + SAVED_EVERY, launcher, until_finished=True)
    else:
        _wait(lambda: last_iteration(save) >= target, launcher, until_finished=True)
    time.sleep(draw.uniform(0.0, 0.05))


def _saves(save: Path) -> bool:
    """Return whether a checkpoint is being written that does not have its name yet."""
    return any(not re.fullmatch(r"iter_\d+", name) and "iter_" in name for name in _names(save))


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _kill(kind: str, launcher: Launcher, save: Path, draw: random.Random, sizes: Sequence[int]) -> Kill:
    """Kill, and see to it that the launcher starts the ranks again, another number of them where there are several."""
    there = launcher.ranks
    chosen = [] if kind == "the agent" else draw.sample(range(there), 2 if kind == "two ranks" else 1)
    at = last_iteration(save)
    late = launcher.kill(chosen, draw.choice([size for size in sizes if size != there] or sizes))
    # What the ranks logged until the last of them was gone.
    return Kill(kind, chosen, max(at, last_iteration(save)), late=late, of=there)


def _await_resumption(kill: Kill, began: float, launcher: Launcher, save: Path) -> None:
    """Wait until the run goes on after a kill, and write down what that took."""
    with contextlib.suppress(_Finished):
        _wait(lambda: launcher.resumed_at() is not None, launcher, until_finished=True)
        resumed = launcher.resumed_at()
        assert resumed is not None
        kill.resumed_at = resumed
        _wait(lambda: last_iteration(save) > resumed, launcher, until_finished=True)
        kill.seconds = time.monotonic() - began


class _Finished(Exception):
    """Raised where the training is done before its next kill."""


def _wait(reached: Callable[[], Any], launcher: Launcher, *, until_finished: bool = False) -> None:
    said, deadline = -1, 0.0
    while not reached():
        if until_finished and launcher.finished():
            raise _Finished
        if (now := launcher.log.stat().st_size) != said:
            said, deadline = now, time.monotonic() + _STUCK
        if time.monotonic() > deadline or launcher.failed():
            raise StuckError(f"the run does not go on:\n{launcher.end_of_log()}")
        time.sleep(0.005)


def last_iteration(save: Path) -> int:
    """Return the last iteration in the metrics file, 0 without one."""
    file = save / "metrics.jsonl"
    return max((row["iteration"] for row in read_rows(file)), default=0) if file.exists() else 0


def summary(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all trials (`Trial.as_row`) say together: kills, seconds to resume, steps lost, goodput."""
    kills = [kill for trial in trials for kill in trial["kills"]]
    seconds = sorted(kill["seconds"] for kill in kills if kill["seconds"] is not None)
    lost = [max(0, kill["at"] - kill["resumed_at"]) for kill in kills if kill["resumed_at"] is not None]
    wall = sum(trial["seconds"] for trial in trials)
    equal = [trial for trial in trials if not trial["differences"]]
    elastic = [trial for trial in equal if VARIANTS[trial["variant"]].elastic]
    return {
        "trainings": len(trials),
        "kills": len(kills),
        "kills_by_kind": {kind: sum(kill["kind"] == kind for kill in kills) for kind in KINDS},
        "equal_to_the_bit": len(equal) - len(elastic),
        "elastic_within_tolerance": len(elastic),
        "not_as_the_reference": len(trials) - len(equal),
        "ranks_that_had_to_be_killed_after_10_s": sum(kill["late"] for kill in kills),
        "seconds_to_resume": {
            "median": statistics.median(seconds) if seconds else None,
            "95th percentile": seconds[int(0.95 * (len(seconds) - 1))] if seconds else None,
            "longest": seconds[-1] if seconds else None,
        },
        "steps_lost": {"mean": statistics.mean(lost) if lost else None, "most": max(lost, default=None)},
        "goodput": sum(trial["useful"] for trial in trials) / wall if wall else None,
    }
