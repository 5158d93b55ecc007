"""The planner's estimates against published runs: the table of docs/planner.md, the fit, and its cross-validation.

    python benchmarks/planner.py             the table
    python benchmarks/planner.py --write     the same, with the cross-validation, into docs/planner.md
    python benchmarks/planner.py --fit       the constants of cost/hardware.py and cost/hardware.py computed again

The runs (tests/golden/published_runs.jsonl) are facts: source, GPUs, device, flags, and seconds of a step. The fit
is least squares of log(estimate / published), Gauss-Newton, with a prior for each constant; runs far off weigh less.
Those of published_runs_held_out.jsonl are in no fit: they were written down after it. No torch is needed; the fit needs
numpy.
"""

import argparse
import csv
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

from megatron_ext.config.parse.arguments import parse  # noqa: E402
from megatron_ext.config.resolve import Facts, resolve  # noqa: E402
from megatron_ext.config.schema import Config  # noqa: E402
from megatron_ext.cost.hardware import PROGRAMS_DIFFER, RUNS_DIFFER, TABLE, Constants, Machine, hardware  # noqa: E402  # noqa: E402
from megatron_ext.cost.stage_parameters import Shapes  # noqa: E402
from megatron_ext.cost.workload import Workload  # noqa: E402
from megatron_ext.plugins.planner.calibrate import believed  # noqa: E402
from megatron_ext.plugins.planner.estimate import step_time, time_of  # noqa: E402
from megatron_ext.plugins.planner.layout_evaluation import evaluate_config  # noqa: E402
from megatron_ext.plugins.planner.search_input import placeholders  # noqa: E402

RUNS = ROOT / "tests/golden/published_runs.jsonl"
HELD_OUT = ROOT / "tests/golden/published_runs_held_out.jsonl"
FOUNDRY = ROOT / "tests/golden/published_runs_llm_foundry.csv"
PAGE = ROOT / "docs/planner.md"
_BEGIN, _END = "<!-- benchmarks/planner.py --write -->", "<!-- end -->"
_DEVICES = ("a100", "h100", "h100-96-500w")

_DGXC = "NVIDIA/dgxc-benchmarking"
_FOUNDRY = "mosaicml/llm-foundry scripts/train/benchmarking"

# Of each fitted constant: its prior, and the standard deviation of its logarithm.
PRIORS = {
    "a100": (0.85, 0.05),
    "h100": (0.78, 0.04),
    "h100-96-500w": (0.70, 0.06),
    "a100 fsdp attention": (0.45, 0.25),
    "h100 fsdp attention": (0.33, 0.25),
    "edge": (100.0, 0.7),
    "activations": (2.6, 0.25),
    "straggling": (0.006, 0.2),
    "fsdp_shown": (0.4, 0.5),
}
_NOISE, _FAR = 0.05, 0.12
_FOUNDRY_WEIGHT = 0.5  # of a run of the long table, which is of one program on few nodes


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


def published(path: Path = RUNS) -> list[Run]:
    """Return the runs of a file."""
    return [_run(json.loads(line)) for line in path.read_text().splitlines()]


def foundry() -> list[Run]:
    """Return llm-foundry's other runs in bf16: MPT of 125M to 70B under FSDP, 512 to 65,536 tokens long."""
    with FOUNDRY.open() as file:
        return [_foundry_run(row) for row in csv.DictReader(file)]


def _foundry_run(row: Mapping[str, str]) -> Run:
    flags = (
        f"--num-layers {row['layers']} --hidden-size {row['hidden']} --num-attention-heads {row['heads']} "
        f"--seq-length {row['length']} --vocab-size 50368 --bf16 --hidden-dropout 0 --attention-dropout 0 "
        f"--disable-bias-linear --micro-batch-size {row['micro_batch']} --global-batch-size {row['global_batch']} "
        "--use-torch-fsdp2"
    )
    if row["recompute"] == "1":
        flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    name = f"MPT {row['model']} {row['length']} @{row['gpus']} {row['device']} mbs{row['micro_batch']}"
    seconds = int(row["global_batch"]) * int(row["length"]) / float(row["tokens_per_second"])
    run = {"source": _FOUNDRY, "name": name, "flags": flags, "gpus": int(row["gpus"]), "device": row["device"]}
    return _run({**run, "step_seconds": seconds})


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


def calibrated(
    runs: list[Run],
    found: Mapping[str, float],
    differ: tuple[float, float] = (PROGRAMS_DIFFER, RUNS_DIFFER),
    others: list[Run] | None = None,
) -> dict[str, float]:
    """Return, for each of some runs, the mean error of the others once it corrects them.

    Args:
        differ: how far programs, and runs of one, differ (plugins/planner/calibrate.py).
        others: what is corrected; by default the same runs.
    """
    return {
        one.name: statistics.fmean(
            abs(found[each.name] * believed(1 / found[one.name], *differ) - 1)
            for each in others or runs
            if each is not one
        )
        for one in runs
    }


def components(groups: Iterable[list[Run]], found: Mapping[str, float]) -> tuple[float, float]:
    """Return the standard deviations of log(time / estimate) from one source to another, around 0, and inside of one.

    They are the moments' estimates of a one-way analysis of variance, whose mean is known to be 0.
    """
    logarithms = [[-math.log(found[run.name]) for run in own] for own in groups]
    number = sum(map(len, logarithms))
    inside = sum((len(own) - 1) * statistics.variance(own) for own in logarithms if len(own) > 1)
    inside /= number - len(logarithms)
    means = sum(len(own) * statistics.fmean(own) ** 2 for own in logarithms) / len(logarithms)
    between = max((means - inside) * len(logarithms) / number, 0.0)
    return math.sqrt(between), math.sqrt(inside)


def sources(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs by source."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.source, []).append(run)
    return found


class Fit:
    """Least squares over some runs, whose simulated bubbles are kept from the first estimate."""

    def __init__(self, runs: list[Run], lighter: list[Run]):
        self.runs, self.lighter = runs, lighter
        self._best: list[float] | None = None
        """The fit of all runs, from which those of some of them begin."""
        self.work = {run.name: Workload(run.config, Shapes(run.config), fused=True) for run in (*runs, *lighter)}
        self.exact = {run.name: run.estimate() / self._quick(run, run.machine) for run in (*runs, *lighter)}

    def constants(self, runs: list[Run]) -> dict[str, float]:
        """Return the constants that fit these runs."""
        start = [0.0] * len(PRIORS) if self._best is None else self._best
        found = self._fitted(runs, start, 6 if self._best is None else 3)
        if runs == self.runs:
            self._best = found
        return self._values(found)

    def _fitted(self, runs: list[Run], start: list[float], steps: int) -> list[float]:
        """Return the logarithms of the constants over their priors, after some steps of Gauss and Newton."""
        import numpy as np

        left_out = {run.source for run in self.runs} - {run.source for run in runs}
        fitted = [*runs, *(run for run in self.lighter if run.source not in left_out)]
        at = np.array(start)
        for _ in range(steps):
            now = np.array(self._residuals(fitted, at))
            moved = [np.array(self._residuals(fitted, at + 1e-3 * unit)) for unit in np.eye(len(at))]
            slopes = np.stack([(each - now) / 1e-3 for each in moved], axis=1)
            weights = np.ones(len(now))
            weights[: len(fitted)] = 1 / np.sqrt(1 + (now[: len(fitted)] / _FAR) ** 2)
            change = np.linalg.lstsq(slopes * weights[:, None], -now * weights, rcond=None)[0]
            at = at + np.clip(change, -0.5, 0.5)
        return list(at)

    def ratio(self, run: Run, constants: Mapping[str, float]) -> float:
        """Return estimated over published seconds under other constants."""
        return self._quick(run, _machine(run.machine, constants)) * self.exact[run.name] / run.seconds

    def _quick(self, run: Run, machine: Machine) -> float:
        return time_of(self.work[run.name], machine, bubble="formula").total

    def _values(self, at: Iterable[float]) -> dict[str, float]:
        return {name: prior * math.exp(each) for (name, (prior, _)), each in zip(PRIORS.items(), at, strict=True)}

    def _residuals(self, runs: list[Run], at: Any) -> list[float]:
        constants = self._values(at)
        priors = [each / spread * _NOISE for each, (_, spread) in zip(at, PRIORS.values(), strict=True)]
        return [self._weight(run) * math.log(self.ratio(run, constants)) for run in runs] + priors

    def _weight(self, run: Run) -> float:
        return _FOUNDRY_WEIGHT if run in self.lighter else 1.0


def _machine(machine: Machine, values: Mapping[str, float]) -> Machine:
    name = "a100" if machine.devices.name == "a100-40" else machine.devices.name
    share, chip = values[name], name[:4]
    # What limits a chip's power limits attention as much.
    limited = share / values["h100"] if name == "h100-96-500w" else 1.0
    devices = dataclasses.replace(
        machine.devices,
        matmul_share=share,
        attention_share=TABLE[chip].attention_share * limited,
        fsdp_attention_share=values[f"{chip} fsdp attention"] * limited,
    )
    fitted = {key: value for key, value in values.items() if not key.startswith(_DEVICES)}
    return dataclasses.replace(machine, devices=devices, constants=dataclasses.replace(Constants(), **fitted))


def cross_validated(fit: Fit) -> dict[str, float]:
    """Return the ratios of each source's runs under the constants that the other sources' runs give."""
    found = {}
    fit.constants(fit.runs)
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
    return [*lines, "", *corrections(runs, found)]


def corrections(runs: list[Run], found: Mapping[str, float]) -> list[str]:
    """Return what one run corrects, source by source; its constants come from the other sources in the last column."""
    groups = {source: own for source, own in sources(runs).items() if len(own) > 1}
    between, inside = components(groups.values(), found)
    lines = [
        "Mean error of a source's other runs once one of them corrects them (`--calibrate`); from one source to "
        f"another log(time / estimate) has a standard deviation of {between:.3f}, inside of one of {inside:.3f}:",
        "",
        "| source | not corrected | mean over which one | worst choice | the same by the other sources' deviations |",
        "|---|---|---|---|---|",
    ]
    for source, own in groups.items():
        before = statistics.fmean(abs(found[run.name] - 1) for run in own)
        errors = calibrated(own, found).values()
        others = components([each for other, each in groups.items() if other != source], found)
        unseen = calibrated(own, found, others).values()
        lines.append(
            f"| {source} | {before:.1%} | {statistics.fmean(errors):.1%} | {max(errors):.1%} | {max(unseen):.1%} |"
        )
    return lines


def by_regime(runs: list[Run]) -> list[str]:
    """Return the sums of llm-foundry's other runs by length and by model."""
    found = ratios(runs)
    lines = [
        f"The other {len(runs)} runs of llm-foundry's table (bf16, FSDP, 8 to 512 A100 and H100):",
        "",
        "| runs | number | mean error | bias | worst |",
        "|---|---|---|---|---|",
    ]
    lengths = sorted({run.config.model.seq_length for run in runs})
    sizes = sorted({run.config.model.hidden_size for run in runs})
    rows = [
        (f"{length:,} tokens", [run for run in runs if run.config.model.seq_length == length]) for length in lengths
    ]
    rows += [(f"hidden size {size:,}", [run for run in runs if run.config.model.hidden_size == size]) for size in sizes]
    for title, own in [*rows, ("all", runs)]:
        mean, bias, worst = summary(found[run.name] for run in own)
        lines.append(f"| {title} | {len(own)} | {mean:.1%} | {bias:.3f} | {worst:+.1%} |")
    return lines


def of_no_fit(runs: list[Run]) -> list[str]:
    """Return the table and the sums of runs that no fit has seen."""
    found = ratios(runs)
    lines = [
        f"{len(runs)} runs that are in no fit (`tests/golden/published_runs_held_out.jsonl`):",
        "",
        "| source | run | GPUs | published s | estimate s | estimate / published | memory GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        needed = evaluate_config(run.config, run.machine, math.inf).memory_bytes / 1e9
        lines.append(
            f"| {run.source} | {run.name} | {run.config.layout.world_size:,} {run.machine.devices.name} | "
            f"{run.seconds:.4g} | {found[run.name] * run.seconds:.4g} | {found[run.name]:.3f} | {needed:.1f} |"
        )
    mean, bias, worst = summary(found.values())
    lines.append(f"| all | mean error {mean:.1%}, worst {worst:+.1%} | | | | bias {bias:.3f} | |")
    return [*lines, "", *correcting_those_of_no_fit(runs, found)]


def correcting_those_of_no_fit(runs: list[Run], found: Mapping[str, float]) -> list[str]:
    """Return what each fitted run of dgxc-benchmarking makes of its runs that are in no fit."""
    of_fit, others = ([run for run in each if _DGXC in run.source] for each in (published(), runs))
    ratio = {**found, **ratios(of_fit)}
    errors = calibrated(of_fit, ratio, others=others)
    before = statistics.fmean(abs(ratio[run.name] - 1) for run in others)
    worst = max(errors, key=lambda name: errors[name])
    return [
        f"Of these the {len(others)} of {_DGXC}, corrected by one of its {len(of_fit)} above: mean error "
        f"{statistics.fmean(errors.values()):.1%}, worst choice {errors[worst]:.1%} ({worst}); not corrected "
        f"{before:.1%}."
    ]


def main() -> None:
    """Print, fit or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    runs, others = published(), foundry()
    found = ratios(runs)
    fit = Fit(runs, others) if options.fit or options.write else None
    if fit is not None and options.fit:
        print({name: float(f"{value:.4g}") for name, value in fit.constants(runs).items()})
    left_out = None if fit is None else cross_validated(fit)
    lines = [
        *table(runs, found, left_out),
        "",
        *conclusions(runs, found, left_out),
        "",
        *of_no_fit(published(HELD_OUT)),
    ]
    lines += ["", *by_regime(others)]
    print("\n".join(lines))
    if options.write:
        before, rest = PAGE.read_text().split(_BEGIN)
        PAGE.write_text("\n".join([f"{before}{_BEGIN}", "", *lines, "", f"{_END}{rest.split(_END)[1]}"]))


if __name__ == "__main__":
    main()
