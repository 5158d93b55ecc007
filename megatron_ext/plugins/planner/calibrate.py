"""Corrects the estimates by one measured run of one's own: measured over estimated seconds of a step.

The correction is one number for every time. What it stands for (versions of libraries, clocks, the fabric, kernels that
are fused or not) is much the same for other layouts of the same program on the same machine; docs/planner.md shows how
far that carries.

A run also differs from its estimate for reasons of its own, which no other layout shares. Of the logarithm r of
measured over estimated time, only the share that comes from differences between programs is believed, not the share
from differences between runs of one program: r t^2 / (t^2 + s^2), with the standard deviations t (programs) and s
(runs) of cost/hardware.py. This is the posterior mean where both are normal. Where r is larger than the two explain, t
is chosen to explain it (t^2 = r^2 - s^2, empirical Bayes), so that a machine of half the speed is believed to be one.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.cost.hardware import ASSUMED_PROGRAMS_DIFFER, PROGRAMS_DIFFER, RUNS_DIFFER, Machine
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.estimate import step_time
from megatron_ext.rules.validate import problems
from megatron_ext.untrusted.metrics_rows import read_rows

_WARM_UP = 0.2  # share of the rows, at most this many steps, that compile, fill caches and settle
_MOST_WARM_UP = 10


@dataclass(frozen=True)
class Measured:
    """A run's speed, as its metrics file records it."""

    seconds: float
    """Median seconds of a step, without the first ones."""

    global_batch_size: int | None
    world_size: int | None


def read_metrics(path: Path) -> Measured:
    """Return the speed that a run's metrics file records.

    Raises:
        ConfigurationError: the file is missing, or has no step of a training run.
        DataError: no line is a row of a metrics file, or it is too large.
    """
    if not path.is_file():
        raise ConfigurationError(f"--calibrate {path} is no file; give the metrics.jsonl of a run")
    rows = [row for row in read_rows(path) if 0.0 < (row.get("elapsed_ms") or 0.0) < math.inf]
    if not rows:
        raise ConfigurationError(
            f"--calibrate {path} has no row with elapsed_ms; give the metrics.jsonl of a run that logged some steps"
        )
    rows = rows[min(int(len(rows) * _WARM_UP), _MOST_WARM_UP) :]
    last = rows[-1]
    rows = [row for row in rows if row.get("global_batch_size") == last.get("global_batch_size")]
    return Measured(
        statistics.median(row["elapsed_ms"] for row in rows) / 1000.0,
        last.get("global_batch_size"),
        last.get("world_size"),
    )


def corrected(machine: Machine, values: Mapping[str, Any], facts: Facts, measured: Measured) -> Machine:
    """Return the machine with a correction of its estimates: the believed share of the measured run's deviation (see
    the head of this file).

    Args:
        values: the measured run's values of flags, by field name.
    Raises:
        ConfigurationError: the rules refuse the measured run's flags.
    """
    known = dict(values)
    if measured.global_batch_size is not None:
        known["global_batch_size"] = measured.global_batch_size
    world_size = known.pop("world_size", None) or measured.world_size or 1
    config = resolve({**known, "world_size": world_size}, facts)
    if refusals := problems(config, facts):
        raise ConfigurationError([f"the run of --calibrate: {problem}" for problem in refusals])
    ratio = measured.seconds / step_time(config, Shapes(config), replace(machine, correction=None)).total
    programs = PROGRAMS_DIFFER if machine.devices.fitted else ASSUMED_PROGRAMS_DIFFER
    return replace(machine, correction=believed(ratio, programs), measured_ratio=ratio)


def believed(ratio: float, programs: float = PROGRAMS_DIFFER, runs: float = RUNS_DIFFER) -> float:
    """Return the factor for all times that one run gives which took `ratio` times its estimate.

    Args:
        programs: standard deviation of log(time / estimate) from one program and machine to another.
        runs: the same from one run to another of one program and machine.
    """
    log_ratio = math.log(ratio)
    between = max(programs**2, log_ratio**2 - runs**2)
    return math.exp(log_ratio * between / (between + runs**2))
