"""The planner's estimates against published runs: the table of docs/planner.md, the fit, and its cross-validation.

    python benchmarks/planner.py             the table
    python benchmarks/planner.py --write     the same, with the cross-validation, into docs/planner.md
    python benchmarks/planner.py --fit       the constants of plan/constants.py and plan/hardware.py computed again

The runs (tests/golden/published_runs.jsonl) are facts: source, GPUs, device, flags, and seconds of a step. The fit
is least squares of log(estimate / published), Gauss-Newton, with a prior for each constant; runs far off weigh less. No
torch is needed; the fit needs numpy.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ext.config.arguments import parse  # noqa: E402
from megatron_ext.config.resolve import Facts, resolve  # noqa: E402
from megatron_ext.config.schema import Config  # noqa: E402
from megatron_ext.plan.constants import Constants  # noqa: E402
from megatron_ext.plan.estimate import step_time  # noqa: E402
from megatron_ext.plan.evaluation import evaluate_config  # noqa: E402
from megatron_ext.plan.hardware import TABLE, Machine, hardware  # noqa: E402
from megatron_ext.plan.question import placeholders  # noqa: E402
from megatron_ext.plan.shapes import Shapes  # noqa: E402

RUNS = ROOT / "tests/golden/published_runs.jsonl"
PAGE = ROOT / "docs/planner.md"
_BEGIN, _END = "<!-- benchmarks/planner.py --write -->", "<!-- end -->"
_DEVICES = ("a100", "h100", "h100-96-500w")

# Of each fitted constant: its prior, and the standard deviation of its logarithm.
PRIORS = {
    "a100": (0.85, 0.05),
    "h100": (0.78, 0.04),
    "h100-96-500w": (0.70, 0.06),
    "edge": (100.0, 0.7),
    "activations": (2.6, 0.25),
    "unfused": (1.5, 0.3),
    "straggling": (0.006, 0.2),
}
_NOISE, _FAR = 0.05, 0.12


@dataclass(frozen=True)
class Run:
    """A published run."""

    source: str
    name: str
    config: Config
    machine: Machine
    seconds: float

    def estimate(self) -> float:
        """Return the estimated seconds of a step."""
        return step_time(self.config, Shapes(self.config), self.machine).total


def published() -> list[Run]:
    """Return the runs of the file."""
    return [_run(json.loads(line)) for line in RUNS.read_text().splitlines()]


def _run(row: Mapping[str, Any]) -> Run:
    values = parse(row["flags"].split()).values
    facts = Facts(cuda_available=True)
    config = resolve({**values, **placeholders(values), "world_size": row["gpus"]}, facts)
    devices = hardware(
        row["device"],
        memory_gb=row.get("device_memory_gb"),
        memory_bandwidth_gb_s=row.get("memory_bandwidth_gb_s"),
        inter_node_gb_s=row.get("inter_node_gb_s"),
    )
    return Run(row["source"], row["name"], config, Machine(devices), row["step_seconds"])


def ratios(runs: Iterable[Run]) -> dict[str, float]:
    """Return estimated over published seconds by name."""
    return {run.name: run.estimate() / run.seconds for run in runs}


def summary(found: Iterable[float]) -> tuple[float, float, float]:
    """Return mean absolute error, bias (mean ratio) and the worst error, of ratios."""
    every = list(found)
    return (
        statistics.fmean(abs(ratio - 1) for ratio in every),
        statistics.fmean(every),
        max((ratio - 1 for ratio in every), key=abs),
    )


def calibrated(runs: list[Run], found: Mapping[str, float]) -> dict[str, float]:
    """Return, for each of some runs, the mean error of the others once it corrects them."""
    return {
        one.name: statistics.fmean(abs(found[each.name] / found[one.name] - 1) for each in runs if each is not one)
        for one in runs
    }


def sources(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs by source."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.source, []).append(run)
    return found


class Fit:
    """Least squares over some runs, whose simulated bubbles are kept from the first estimate."""

    def __init__(self, runs: list[Run]):
        self.runs = runs
        self.exact = {run.name: run.estimate() / self._quick(run, run.machine) for run in runs}

    def constants(self, runs: list[Run], steps: int = 6) -> dict[str, float]:
        """Return the constants that fit these runs."""
        import numpy as np

        at = np.zeros(len(PRIORS))
        for _ in range(steps):
            now = np.array(self._residuals(runs, at))
            moved = [np.array(self._residuals(runs, at + 1e-3 * unit)) for unit in np.eye(len(at))]
            slopes = np.stack([(each - now) / 1e-3 for each in moved], axis=1)
            weights = np.ones(len(now))
            weights[: len(runs)] = 1 / np.sqrt(1 + (now[: len(runs)] / _FAR) ** 2)
            change = np.linalg.lstsq(slopes * weights[:, None], -now * weights, rcond=None)[0]
            at = at + np.clip(change, -0.5, 0.5)
        return self._values(at)

    def ratio(self, run: Run, constants: Mapping[str, float]) -> float:
        """Return estimated over published seconds under other constants."""
        return self._quick(run, _machine(run.machine, constants)) * self.exact[run.name] / run.seconds

    def _quick(self, run: Run, machine: Machine) -> float:
        return step_time(run.config, Shapes(run.config), machine, quick=True).total

    def _values(self, at: Iterable[float]) -> dict[str, float]:
        return {name: prior * math.exp(each) for (name, (prior, _)), each in zip(PRIORS.items(), at, strict=True)}

    def _residuals(self, runs: list[Run], at: Any) -> list[float]:
        constants = self._values(at)
        priors = [each / spread * _NOISE for each, (_, spread) in zip(at, PRIORS.values(), strict=True)]
        return [math.log(self.ratio(run, constants)) for run in runs] + priors


def _machine(machine: Machine, values: Mapping[str, float]) -> Machine:
    name = machine.devices.name
    share = values[name]
    # What limits a chip's power limits attention as much.
    attention = TABLE["h100"].attention_share * share / values["h100"] if name == "h100-96-500w" else None
    devices = dataclasses.replace(
        machine.devices, matmul_share=share, attention_share=attention or machine.devices.attention_share
    )
    fitted = {key: value for key, value in values.items() if key not in _DEVICES}
    return dataclasses.replace(machine, devices=devices, constants=dataclasses.replace(Constants(), **fitted))


def cross_validated(fit: Fit) -> dict[str, float]:
    """Return the ratios of each source's runs under the constants that the other sources' runs give."""
    found = {}
    for own in sources(fit.runs).values():
        constants = fit.constants([run for run in fit.runs if run not in own])
        found |= {run.name: fit.ratio(run, constants) for run in own}
    return found


def table(runs: list[Run], found: Mapping[str, float], left_out: Mapping[str, float] | None) -> list[str]:
    """Return the table in Markdown."""
    lines = [
        "| source | run | GPUs | published s | estimate s | estimate / published | source left out | memory GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        other = "" if left_out is None else f"{left_out[run.name]:.3f}"
        needed = evaluate_config(run.config, run.machine, math.inf).memory_bytes / 1e9
        lines.append(
            f"| {run.source} | {run.name} | {run.config.layout.world_size:,} {run.machine.devices.name} | "
            f"{run.seconds:.4g} | {found[run.name] * run.seconds:.4g} | {found[run.name]:.3f} | {other} | "
            f"{needed:.1f} |"
        )
    return lines


def conclusions(runs: list[Run], found: Mapping[str, float], left_out: Mapping[str, float] | None) -> list[str]:
    """Return the sums of the table: by source, all together, and what one run corrects."""
    lines = ["| runs | mean error | bias | worst |", "|---|---|---|---|"]
    rows = [(source, [found[run.name] for run in own]) for source, own in sources(runs).items()]
    rows.append((f"all {len(runs)}", list(found.values())))
    if left_out is not None:
        rows.append(("all, each source left out of the fit in turn", list(left_out.values())))
    for title, every in rows:
        mean, bias, worst = summary(every)
        lines.append(f"| {title} | {mean:.1%} | {bias:.3f} | {worst:+.1%} |")
    lines += ["", "Mean error of a source's other runs once one of them corrects them (`--calibrate`):", ""]
    lines += ["| source | mean over which one | worst choice |", "|---|---|---|"]
    for source, own in sources(runs).items():
        if len(own) > 1:
            errors = calibrated(own, found).values()
            lines.append(f"| {source} | {statistics.fmean(errors):.1%} | {max(errors):.1%} |")
    return lines


def main() -> None:
    """Print, fit or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    runs = published()
    found = ratios(runs)
    fit = Fit(runs) if options.fit or options.write else None
    if fit is not None and options.fit:
        print({name: float(f"{value:.4g}") for name, value in fit.constants(runs).items()})
    left_out = None if fit is None else cross_validated(fit)
    lines = [*table(runs, found, left_out), "", *conclusions(runs, found, left_out)]
    print("\n".join(lines))
    if options.write:
        before, rest = PAGE.read_text().split(_BEGIN)
        PAGE.write_text("\n".join([f"{before}{_BEGIN}", "", *lines, "", f"{_END}{rest.split(_END)[1]}"]))


if __name__ == "__main__":
    main()
