"""Keeps losses of a few layouts in a file: the same on the machine that wrote them, nearly the same on others.

    tests/golden/losses/torch-2.15.json
    {"torch": "2.15.0", "megatron-core": "0.19.2", "cpu": "..., AVX512", "losses": {layout: {field: [hex, ...]}}}

Sums are made in another order by another version of torch, or on a CPU with other vector instructions; only where
both are those of the file must the bits be.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.losses import layouts
from tests.support.losses.commits import ROOT, cpu_kind, run_jobs, scratch_folder

FIELDS = ("lm_loss", "grad_norm", "validation_loss")
TOLERANCE = 1e-6
"""Relative tolerance on another machine or with another torch."""

Losses = dict[str, dict[str, list[str]]]
"""Losses by layout and field: one number for each step or evaluation, as a hexadecimal float."""


def here() -> dict[str, str]:
    """Return what the bits depend on besides the code."""
    return {"torch": version("torch"), "megatron-core": version("megatron-core"), "cpu": cpu_kind()}


def train() -> Losses:
    """Train the layouts of `layouts.GOLDEN` with this working tree.

    Raises:
        RuntimeError: a layout fails; the end of its log is in the text.
    """
    jobs = layouts.golden_jobs()
    with scratch_folder() as scratch:
        results = {result["name"]: result for result in run_jobs(ROOT, list(jobs.values()), scratch, workers=2)}
    return {name: losses_of(results[name]) for name in jobs}


def losses_of(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the losses in a job's result, by field.

    Raises:
        RuntimeError: the job failed.
    """
    if "failed" in result:
        raise RuntimeError(f"{result['name']} failed in {result['failed']}")
    rows = result["stages"]["train"]["rows"]
    return {field: [row[field].hex() for row in rows if row.get(field) is not None] for field in FIELDS}


def file_for(folder: Path) -> Path:
    """Return the file of this version of torch, by major and minor number."""
    return folder / f"torch-{'.'.join(version('torch').split('.')[:2])}.json"


def write(folder: Path) -> Path:
    """Train, and write the file of this torch and this machine."""
    path = file_for(folder)
    path.write_text(json.dumps({**here(), "losses": train()}, indent=1) + "\n", encoding="utf-8")
    return path


def differences(expected: Losses, found: Losses, tolerance: float) -> Iterator[str]:
    """Yield every number that is farther than `tolerance` (relative; 0: another bit) from what is expected."""
    for layout, fields in expected.items():
        for field, numbers in fields.items():
            others = found[layout][field]
            if len(others) != len(numbers):
                yield f"{layout}: {len(numbers)} and {len(others)} numbers of {field}"
            for place, (one, other) in enumerate(zip(numbers, others, strict=False), start=1):
                known, number = float.fromhex(one), float.fromhex(other)
                if not abs(number - known) <= tolerance * abs(known):
                    yield f"{layout}: number {place} of {field} is {one} and {other} ({known!r} and {number!r})"
