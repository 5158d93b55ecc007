"""Kills trainings at random and reports restarts, seconds to resume, steps lost and goodput; parts add up.

    python benchmarks/endurance.py --kills 100 --resume benchmarks/results/endurance-2026-11-22.json

A training of a tiny model is killed about ten times: any rank, two at once, during a step, a save or the recovery from
the last kill, and, under torchrun, the agent. Then its metrics and the tensors of its last checkpoint are compared, to
the bit, with those of a training that nobody touched. Then the next one begins, in another layout, until there were
--kills kills or --seconds are over. Results go into the file of --resume, after those that it holds, and a .md of that
name. The exit code is 1 if any training came out other than its reference, or did not go on.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence
from megatron_ext.durable import replacing
from megatron_ext.verify import endurance


def main() -> int:
    """Run trainings until there are kills enough; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="to add to what the file holds")
    parser.add_argument("--kills-each", type=int, default=6, help="in one training, about")
    parser.add_argument("--seconds", type=float, default=480.0, help="no training begins after so many")
    parser.add_argument("--resume", type=Path, required=True, metavar="FILE", help="results, made or continued")
    parser.add_argument("--layouts", nargs="+", choices=endurance.CASES, default=list(endurance.CASES))
    parser.add_argument("--variants", nargs="+", choices=endurance.VARIANTS, default=list(endurance.VARIANTS))
    parser.add_argument("--torchrun-every", type=int, default=8, help="one training of so many is torchrun's; 0: none")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left
    record = _read(options.resume)
    record["parts"].append({**heading(), "kills": 0, "first_trial": len(record["trials"])})
    deadline, wanted = time.monotonic() + options.seconds, _kills(record) + options.kills
    references: dict[str, endurance.Reference] = {}
    while _kills(record) < wanted and time.monotonic() < deadline:
        number = len(record["trials"])
        draw = random.Random(number)
        names = draw.choice(options.layouts), draw.choice(options.variants)
        torchrun = options.torchrun_every > 0 and number % options.torchrun_every == options.torchrun_every - 1
        row = _trial(names, draw, min(options.kills_each, wanted - _kills(record)), torchrun, references)
        record["trials"].append(row)
        record["parts"][-1]["kills"] += len(row["kills"])
        _write(options.resume, record)
        print(f"{number}: {', '.join(names)}: {len(row['kills'])} kills in {row['seconds']:.0f} s", flush=True)
        for difference in row["differences"]:
            print(f"    {difference}", flush=True)
    print(json.dumps(endurance.summary(record["trials"]), indent=2))
    return int(any(trial["differences"] for trial in record["trials"]))


def _trial(
    names: tuple[str, str],
    draw: random.Random,
    kills: int,
    torchrun: bool,
    references: dict[str, endurance.Reference],
) -> dict[str, Any]:
    """Run one training, and the reference of its layout if this is its first."""
    layout = names[0]
    with tempfile.TemporaryDirectory() as folder:
        if layout not in references:
            references[layout] = endurance.reference(endurance.CASES[layout], Path(folder, "reference"))
        expected = references[layout]
        try:
            trial = endurance.run_trial(names, Path(folder, "run"), expected, draw, kills=kills, torchrun=torchrun)
        except endurance.StuckError as error:
            trial = endurance.Trial(*names, "Torchrun" if torchrun else "ForkedRanks", differences=[str(error)])
    return trial.as_row()


def _kills(record: dict[str, Any]) -> int:
    return sum(len(trial["kills"]) for trial in record["trials"])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"parts": [], "trials": []}


def _write(path: Path, record: dict[str, Any]) -> None:
    found = endurance.summary(record["trials"])
    lines = [f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in found.items()]
    parts = [f"- {part['kills']} kills, {part['date']}: {sentence(part)}" for part in record["parts"]]
    by_layout = [_line(record, layout, variant) for layout in endurance.CASES for variant in endurance.VARIANTS]
    text = ["# Endurance", "", "| | |", "|---|---|", *lines, ""]
    text += ["| layout | saves | trainings | kills | equal to the bit |", "|---|---|---|---|---|"]
    text += [*filter(None, by_layout), "", *parts, ""]
    with replacing(path) as file:
        file.write((json.dumps(record) + "\n").encode())
    path.with_suffix(".md").write_text("\n".join(text))


def _line(record: dict[str, Any], layout: str, variant: str) -> str | None:
    trials = [trial for trial in record["trials"] if (trial["layout"], trial["variant"]) == (layout, variant)]
    kills = sum(len(trial["kills"]) for trial in trials)
    equal = sum(not trial["differences"] for trial in trials)
    return f"| {layout} | {variant} | {len(trials)} | {kills} | {equal} |" if trials else None


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(inner)}" for name, inner in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
