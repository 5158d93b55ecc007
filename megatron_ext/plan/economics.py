"""What tools/plan.py says beyond the layouts: what a whole run costs, how it scales, and what limits it."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigurationError
from megatron_ext.plan import costs, limits, scaling
from megatron_ext.plan.costs import Prices, cost, count_of_tokens
from megatron_ext.plan.goodput import LLAMA_3_HOURS, Failures
from megatron_ext.plan.presentation import name
from megatron_ext.plan.scaling import DEVICES, LENGTHS, Point, Wanted, over_devices, over_lengths, scaling_page
from megatron_ext.plan.search import Candidate, Question

_OF_COSTS = ("--dollars-per-hour", "--watts", "--stall")
_SAVED_GB_S = 2.0  # of one device: what a checkpoint's copy reaches, as long as nobody has measured the stall


@dataclass(frozen=True)
class Economics:
    """Whatever of this was asked for."""

    lines: list[str]
    json: dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this file."""
    parser.add_argument("--tokens", metavar="15T", help="tokens of the whole run: says what it costs")
    parser.add_argument("--dollars-per-hour", type=float, metavar="X", help="price of one device's hour")
    parser.add_argument("--watts", type=float, metavar="X", help="power of one device; default its data sheet's alone")
    parser.add_argument(
        "--mtbf-hours", type=float, metavar="X", default=round(LLAMA_3_HOURS), help="between failures of one device"
    )
    parser.add_argument(
        "--stall", type=float, metavar="X", help="seconds that a checkpoint stops training, as the log prints them"
    )
    parser.add_argument("--restart-minutes", type=float, metavar="X", default=10.0, help="from a failure to a new step")
    parser.add_argument("--limits", action="store_true", help="say what 10%% more or less of each part would change")
    parser.add_argument("--over-devices", type=int, nargs="+", metavar="N", help="the best for each number of devices")
    parser.add_argument("--over-seq-lengths", type=int, nargs="+", metavar="N", help="the best for each length")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the --over-... tables as a page with charts")


def economics(question: Question, best: Sequence[Candidate], options: argparse.Namespace) -> Economics:
    """Return what the flags ask for, and write the page.

    Args:
        best: the layouts found, fastest first; at least one.
    Raises:
        ConfigurationError: a value cannot be used.
        OSError: the page cannot be written.
    """
    if options.evaluate and (options.over_devices or options.over_seq_lengths or options.html):
        raise ConfigurationError(
            "--over-devices, --over-seq-lengths and --html search, but --evaluate chooses nothing; leave it out, or "
            "evaluate one number at a time"
        )
    unused = [flag for flag in _OF_COSTS if getattr(options, flag.removeprefix("--").replace("-", "_")) is not None]
    if unused and options.tokens is None:
        raise ConfigurationError(f"{unused[0]} is part of what a whole run costs; add --tokens, as in --tokens 15T")
    lines: list[str] = []
    found: dict[str, Any] = {}
    wanted = _wanted(question, best[0], options)
    if wanted.tokens is not None:
        config = best[0].config
        step_tokens = (config.training.global_batch_size or 0) * config.model.seq_length
        arguments = (wanted.tokens, step_tokens, best[0].seconds, question.world_size)
        spent = cost(*arguments, wanted.failures, wanted.prices)
        lines += ["", *costs.lines(spent, wanted.failures, best[0].seconds, question.machine.range)]
        found["cost"] = asdict(spent)
    if options.limits:
        parts = limits.limits(question, best, searched=not options.evaluate)
        lines += ["", *limits.table(parts, best)]
        found["limits"] = [asdict(part) for part in parts]
    groups = _groups(question, options, wanted)
    for along, points in groups:
        lines += ["", *scaling.table(points, along)]
        found[f"over_{along.replace(' ', '_')}"] = [_row(point) for point in points]
    if options.html is not None:
        if not groups:
            raise ConfigurationError("--html draws what --over-devices or --over-seq-lengths found; give one of them")
        options.html.write_text(scaling_page(_title(question), groups), encoding="utf-8")
    return Economics(lines, found)


def _wanted(question: Question, best: Candidate, options: argparse.Namespace) -> Wanted:
    stall = options.stall
    if stall is None:
        stall = (best.memory.weights + best.memory.optimizer) / (_SAVED_GB_S * 1e9)
    watts = options.watts if options.watts is not None else question.machine.devices.power_watts or None
    return Wanted(
        tokens=None if options.tokens is None else count_of_tokens(options.tokens),
        failures=Failures(options.mtbf_hours, stall, 60.0 * options.restart_minutes),
        prices=Prices(options.dollars_per_hour, watts),
    )


def _groups(question: Question, options: argparse.Namespace, wanted: Wanted) -> list[tuple[str, list[Point]]]:
    groups = []
    for flag, along, over in (
        ("over_devices", DEVICES, over_devices),
        ("over_seq_lengths", LENGTHS, over_lengths),
    ):
        numbers = getattr(options, flag)
        if numbers is None:
            continue
        if min(numbers) < 1:
            raise ConfigurationError(f"--{flag.replace('_', '-')} {min(numbers)} is not above 0")
        groups.append((along, over(question, sorted(set(numbers)), wanted)))
    return groups


def _title(question: Question) -> str:
    values = question.values
    return (
        f"{values.get('num_layers')} layers of {values.get('hidden_size')} on {question.machine.devices.name}, "
        f"{values['global_batch_size']:,} samples of {values.get('seq_length'):,} tokens a step: estimates"
    )


def _row(point: Point) -> dict[str, Any]:
    if point.best is None:
        return {"number": point.number, "layout": None}
    return {
        "number": point.number,
        "layout": name(point.best),
        **dict(zip(("step_seconds", "step_seconds_low", "step_seconds_high"), point.seconds, strict=True)),
        "tokens_per_second": point.tokens_per_second,
        "mfu": point.mfu,
        "memory_bytes": point.best.memory.total,
        "cost": None if point.cost is None else asdict(point.cost),
    }
