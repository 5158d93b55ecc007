"""What a whole run costs on a layout: days, device-hours, money and energy, failures included.

time = tokens / tokens of a step x seconds of a step / useful share of the time (plan/goodput.py)
"""

import re
from dataclasses import dataclass

from megatron_ext.errors import ConfigurationError
from megatron_ext.plan.goodput import Failures, Goodput, goodput

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Prices:
    """What an hour of a device costs; None where it is not known."""

    dollars_per_hour: float | None = None
    watts: float | None = None
    """Power of a device, with whatever the user wants to have counted."""


@dataclass(frozen=True)
class Cost:
    """What a run costs."""

    tokens: int
    steps: int
    days: float
    """Expected days, failures included."""

    device_hours: float
    dollars: float | None
    kilowatt_hours: float | None
    goodput: Goodput


def cost(tokens: int, step_tokens: int, step_seconds: float, devices: int, failures: Failures, prices: Prices) -> Cost:
    """Return what it costs to train on so many tokens.

    Args:
        step_tokens: tokens of one step.
        step_seconds: seconds of one step.
    """
    steps = -(-tokens // step_tokens)
    good = goodput(failures, devices)
    hours = steps * step_seconds / good.share / 3600.0
    device_hours = hours * devices
    dollars = None if prices.dollars_per_hour is None else device_hours * prices.dollars_per_hour
    energy = None if prices.watts is None else device_hours * prices.watts / 1000.0
    return Cost(tokens, steps, hours / 24.0, device_hours, dollars, energy, good)


def count_of_tokens(text: str) -> int:
    """Return the number that "15T", "300B", "1.5e12" or "4096" stands for.

    Raises:
        ConfigurationError: it stands for none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([KMBT]?)", text.replace(",", "").replace("_", ""))
    number = float(match[1]) * _SUFFIXES[match[2]] if match else 0.0
    if not 1 <= number < 1e18:
        raise ConfigurationError(f"{text!r} is no number of tokens; write for example 300B, 15T or 1.5e12")
    return round(number)


def lines(found: Cost, failures: Failures, step_seconds: float, spread: tuple[float, float] = (1.0, 1.0)) -> list[str]:
    """Return the cost in words.

    Args:
        spread: the time over the estimate between which nine of ten runs are expected, which all of it goes with.
    """
    good, (low, high) = found.goodput, spread
    days = f"{found.days:,.1f} days ({low * found.days:,.1f} to {high * found.days:,.1f})"
    parts = [days, f"{found.device_hours:,.0f} device-hours"]
    if found.dollars is not None:
        parts.append(f"${found.dollars:,.0f}")
    if found.kilowatt_hours is not None:
        parts.append(f"{found.kilowatt_hours:,.0f} kWh")
    every = max(round(good.interval / step_seconds), 1)
    return [
        f"{found.tokens:,} tokens are {found.steps:,} steps: {', '.join(parts)}",
        f"    of that time {good.share:.1%} is useful: something breaks every {_hours(good.seconds_between)} (a device "
        f"every {failures.device_hours:,.0f} hours), a restart takes {_hours(failures.restart)},",
        f"    a checkpoint stops training for {failures.stall:.3g} s: save every {_hours(good.interval)} "
        f"(--save-interval {every}); the formulas are Young's and Daly's (plan/goodput.py)",
    ]


def _hours(seconds: float) -> str:
    if seconds >= 172800:
        return f"{seconds / 86400:.3g} days"
    return f"{seconds / 3600:.3g} hours" if seconds >= 7200 else f"{seconds / 60:.3g} minutes"
