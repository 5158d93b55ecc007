"""Kills trainings at random and reports restarts, seconds to resume, steps lost and goodput; parts add up.

    python benchmarks/endurance.py --kills 100 --resume benchmarks/results/endurance.json
    python benchmarks/endurance.py --kills 900 --launcher forkserver --resume benchmarks/results/endurance.json

A training of a tiny model is killed over and over: any rank, two at once, during a step, a save or the recovery from
the last kill, and, under torchrun, the agent. Then its metrics and the tensors of its last checkpoint are compared, to
the bit, with those of a training that nobody touched; where the number of ranks changes from start to start (elastic),
its metrics are compared within 1e-6. Then the next one begins, in the layout and with the way to save that had the
fewest kills so far, until there were --kills kills or --seconds are over. Results go into the file of --resume, after
those that it holds, and a .md of that name; several of these may run at once with one file. The exit code is 1 if any
training came out other than its reference, or did not go on.

torchrun's ranks import torch at every start, which takes them 7 s of a processor or more each. `--launcher forkserver`
forks the ranks of the same program, with the same flags, from a process that has it loaded, and does what torchrun's
agent does: after a kill it ends the other ranks with SIGTERM, and starts all of them again.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import killed_training
from benchmarks.recording import heading, sentence
from megatron_ext.durable import replacing


def main() -> int:
    """Run trainings until there are kills enough; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="to add to what the file holds")
    parser.add_argument("--kills-each", type=int, default=6, help="in one training, about")
    parser.add_argument("--seconds", type=float, default=480.0, help="no training begins after so many")
    parser.add_argument("--resume", type=Path, required=True, metavar="FILE", help="results, made or continued")
    parser.add_argument("--layouts", nargs="+", choices=killed_training.CASES, default=list(killed_training.CASES))
    parser.add_argument(
        "--variants", nargs="+", choices=killed_training.VARIANTS, default=list(killed_training.VARIANTS)
    )
    parser.add_argument("--launcher", choices=killed_training.LAUNCHERS, default="torchrun", help="starts the ranks")
    parser.add_argument("--keep-failed", type=Path, metavar="FOLDER", help="of the files of what came out otherwise")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left
    part = {**heading(), "launcher": options.launcher, "id": random.SystemRandom().getrandbits(32), "kills": 0}
    deadline, failed = time.monotonic() + options.seconds, False
    references: dict[tuple[str, bool], killed_training.Reference] = {}
    while (left := options.kills - part["kills"]) > 0 and time.monotonic() < deadline:
        names = least_killed(_read(options.resume)["trials"], options.launcher, options.layouts, options.variants)
        row = _trial(names, options.launcher, min(options.kills_each, left), references, options.keep_failed)
        part["kills"] += len(row["kills"])
        part["load_average_at_the_end"] = heading()["machine"]["load_average"]
        _add(options.resume, part, row)
        failed |= bool(row["differences"])
        apart = "" if row["largest"] is None else f", within {row['largest']:.1e}"
        print(f"{', '.join(names)}: {len(row['kills'])} kills in {row['seconds']:.0f} s{apart}", flush=True)
        for difference in row["differences"]:
            print(f"    seed {row['seed']}: {difference}", flush=True)
    print(json.dumps(killed_training.summary(_read(options.resume)["trials"]), indent=2))
    return int(failed)


def _add(path: Path, part: dict[str, Any], row: dict[str, Any]) -> None:
    """Add a training to the file, in which other processes may write as well, and replace what it has of this part."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        record = _read(path)
        record["trials"].append(row)
        others = [each for each in record["parts"] if each.get("id") != part["id"]]
        _write(path, {**record, "parts": [*others, part]})
    finally:
        os.close(folder)


def least_killed(
    trials: Sequence[dict[str, Any]], launcher: str, layouts: Sequence[str], variants: Sequence[str]
) -> tuple[str, str]:
    """Return the layout and the variant, of those to choose from, that had the fewest kills under the launcher."""
    counts = {
        names: _kills(
            trial for trial in trials if (trial["layout"], trial["variant"], trial["launcher"]) == (*names, launcher)
        )
        for names in killed_training.combinations(launcher)
        if names[0] in layouts and names[1] in variants
    }
    if not counts:
        sys.exit(f"none of these layouts can do any of these variants under {launcher}")
    return random.choice([names for names, count in counts.items() if count == min(counts.values())])


def _trial(
    names: tuple[str, str],
    launcher: str,
    kills: int,
    references: dict[tuple[str, bool], killed_training.Reference],
    keep_failed: Path | None,
) -> dict[str, Any]:
    """Run one training, and the reference of its layout if this is its first."""
    seed = random.SystemRandom().getrandbits(32)
    layout, elastic = names[0], killed_training.VARIANTS[names[1]].elastic
    with tempfile.TemporaryDirectory() as folder:
        if (layout, elastic) not in references:
            made = killed_training.reference(killed_training.CASES[layout], Path(folder, "reference"), elastic=elastic)
            references[layout, elastic] = made
        run, expected = Path(folder, "run"), references[layout, elastic]
        try:
            trial = killed_training.run_trial(names, run, expected, random.Random(seed), kills=kills, launcher=launcher)
        except killed_training.StuckError as error:
            trial = killed_training.Trial(*names, launcher, differences=[str(error)])
        if trial.differences and keep_failed is not None:
            shutil.copytree(folder, keep_failed / str(seed))
    trial.seed = seed
    return trial.as_row()


def _kills(trials: Iterable[dict[str, Any]]) -> int:
    return sum(len(trial["kills"]) for trial in trials)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"parts": [], "trials": []}


def _write(path: Path, record: dict[str, Any]) -> None:
    trials = record["trials"]
    launchers = {name: [trial for trial in trials if trial["launcher"] == name] for name in killed_training.LAUNCHERS}
    found = {name: killed_training.summary(theirs) for name, theirs in {"all": trials, **launchers}.items() if theirs}
    text = ["# Endurance", "", f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for name in found["all"]:
        text.append(f"| {name.replace('_', ' ')} | {' | '.join(_shown(column[name]) for column in found.values())} |")
    text += ["", "| layout | saves | launcher | trainings | kills | as the reference |", "|---|---|---|---|---|---|"]
    for layout in killed_training.CASES:
        for variant in killed_training.VARIANTS:
            text += filter(None, (_line(theirs, layout, variant) for theirs in launchers.values()))
    text += ["", *_explained(trials), "", *(_of_part(part) for part in record["parts"]), ""]
    with replacing(path) as file:
        file.write((json.dumps(record) + "\n").encode())
    path.with_suffix(".md").write_text("\n".join(text))


def _line(trials: Sequence[dict[str, Any]], layout: str, variant: str) -> str | None:
    trials = [trial for trial in trials if (trial["layout"], trial["variant"]) == (layout, variant)]
    if not trials:
        return None
    equal = f"{sum(not trial['differences'] for trial in trials)} of {len(trials)}"
    how = "within 1e-6" if killed_training.VARIANTS[variant].elastic else "to the bit"
    return f"| {layout} | {variant} | {trials[0]['launcher']} | {len(trials)} | {_kills(trials)} | {equal} {how} |"


def _explained(trials: Sequence[dict[str, Any]]) -> list[str]:
    largest = max((trial["largest"] for trial in trials if trial.get("largest") is not None), default=None)
    apart = "" if largest is None else f"within {largest:.0e}" if largest else "to the bit"
    elastic = [f"Its metrics were those of the reference {apart}."] if apart else []
    return [
        "Elastic: after each kill the training goes on with its own number of data-parallel ranks or with fewer, drawn",
        "at random; sums then have another order, and dropout, whose masks belong to ranks, is off.",
        *elastic,
        "Snapshots: every 2 steps in memory, checkpoints every 9 steps. Lost machines: each rank has a memory of its",
        "own with a copy of its neighbour's, which is lost with it when it is killed.",
    ]


def _of_part(part: dict[str, Any]) -> str:
    load = part.get("load_average_at_the_end", "unknown")
    launcher = part.get("launcher", "forkserver")
    return f"- {part['kills']} kills, {launcher}, {part['date']}: {sentence(part)} Load average at the end: {load}."


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(inner)}" for name, inner in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
