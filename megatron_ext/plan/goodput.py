"""How much of a long run is useful: what failures, restarts and checkpoints take of it.

With a mean time M between failures of the job, C seconds that training stands still for a checkpoint and R seconds from
a failure until training goes on, a checkpoint every T seconds of training leaves a share of

    T / (M e^(R/M) (e^((T + C)/M) - 1))

of the time that is useful: Daly 2006 (Future Generation Computer Systems 22, pages 303-312), equation 20. Failures are
independent of each other and of time. Of independent devices one fails n times as often, so that M is a device's mean
time over n.
"""

import math
from dataclasses import dataclass

LLAMA_3_HOURS = 16384 * 54 * 24 / 419
"""Mean hours between failures of one device, 50,700: 419 unexpected interruptions in 54 days on 16,384 H100 (Llama Team
2024, arXiv:2407.21783, table 5), whatever broke."""


@dataclass(frozen=True)
class Failures:
    """How often something breaks, and what it takes."""

    device_hours: float = LLAMA_3_HOURS
    """Mean hours between failures of one device, with its share of machine and network."""

    stall: float = 30.0
    """Seconds that training stands still for a checkpoint; with --async-save the stall that the log prints."""

    restart: float = 600.0
    """Seconds from a failure until the first new step: to notice it, start again, load, and warm up."""

    def seconds_between(self, devices: int) -> float:
        """Return the mean time between failures of a job on so many devices, in seconds."""
        return self.device_hours * 3600.0 / devices


@dataclass(frozen=True)
class Goodput:
    """What is left of the time of a job."""

    seconds_between: float
    """Mean seconds between failures of the job."""

    interval: float
    """Seconds of training from one checkpoint to the next."""

    share: float
    """Expected share of the time that is useful."""


def young(stall: float, between: float) -> float:
    """Return the best seconds between checkpoints, to first order: sqrt(2 C M).

    Source: Young 1974 (Communications of the ACM 17, pages 530-531), equation 6.
    """
    return math.sqrt(2.0 * stall * between)


def daly(stall: float, between: float) -> float:
    """Return the best seconds between checkpoints, to a higher order: sqrt(2 C M) (1 + x/3 + x^2/9) - C with
    x = sqrt(C / 2M); M where the stall is 2 M or longer.

    Source: Daly 2006 (Future Generation Computer Systems 22, pages 303-312), equation 37.
    """
    if stall >= 2.0 * between:
        return between
    x = math.sqrt(stall / (2.0 * between))
    return young(stall, between) * (1.0 + x / 3.0 + x * x / 9.0) - stall


def useful_share(interval: float, failures: Failures, devices: int) -> float:
    """Return the expected share of the time that is useful, with a checkpoint every `interval` seconds of training."""
    between = failures.seconds_between(devices)
    lost = math.exp(failures.restart / between) * math.expm1((interval + failures.stall) / between)
    return interval / (between * lost)


def goodput(failures: Failures, devices: int) -> Goodput:
    """Return what is left of the time of a job that saves as often as is best."""
    between = failures.seconds_between(devices)
    interval = daly(failures.stall, between)
    return Goodput(between, interval, useful_share(interval, failures, devices))
