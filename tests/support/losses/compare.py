"""Finds the first place where two results of `losses.run` differ, in words."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.telemetry.metrics import MEASURED_FIELDS

_NEVER_REPEATED = ("exit.json", "commands.jsonl", ".metadata", "manifest.json", ".lock")
"""Files that hold the time of the end, times of starts, a random id of the save, its checksum, and the process that
saved: no two runs write them alike."""

_FIRST = ("iteration", "lm_loss", "validation_loss", "grad_norm")


def first_difference(base: Mapping[str, Any], head: Mapping[str, Any]) -> str | None:
    """Return what differs first: of each stage in turn the metrics, step by step, the tensors saved, the files
    exported.

    Files of checkpoints are left to `different_files`: what is in them is compared here.
    """
    for which, result in (("base", base), ("head", head)):
        if "failed" in result:
            return f"{which} FAILED in {result['failed']}"
    for stage, known in base["stages"].items():
        found = next(_stage_differences(stage, known, head["stages"][stage]), None)
        if found is not None:
            return f"{stage}: {found}"
    return None


def different_files(base: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    """Yield the files, of checkpoints too, that are not equal to the byte or that only one of them has.

    Those of which no two runs write the same bytes are left out: `_NEVER_REPEATED`.
    """
    names = []
    for stage, known in base.get("stages", {}).items():
        other = head.get("stages", {}).get(stage, {"files": {}})
        names += [f"{stage}/{name}" for name in _different(known["files"], other["files"])]
    return [name for name in names if name.rsplit("/", 1)[-1] not in _NEVER_REPEATED]


def _stage_differences(stage: str, base: Mapping[str, Any], head: Mapping[str, Any]) -> Iterator[str]:
    for one, other in zip(base["rows"], head["rows"], strict=False):
        for field in sorted((one.keys() | other.keys()) - MEASURED_FIELDS, key=_importance):
            if not _same(one.get(field), other.get(field)):
                step = f"step {one['iteration']}"
                yield f"{step}: {field} is {_text(one.get(field))} and {_text(other.get(field))}"
    if len(base["rows"]) != len(head["rows"]):
        yield f"{len(base['rows'])} and {len(head['rows'])} rows of metrics"
    for name in _different(base["tensors"], head["tensors"]):
        yield f"{name}: {_one_sided(name, base['tensors'], head['tensors'])}"
    if stage == "export":
        for name in _different(base["files"], head["files"]):
            yield f"file {name}: {_one_sided(name, base['files'], head['files'])}"


def _importance(field: str) -> tuple[int, str]:
    """Return the order of the fields: the loss of a step is told before its norm, and both before what follows from
    them."""
    return _FIRST.index(field) if field in _FIRST else len(_FIRST), field


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


def _one_sided(name: str, one: Mapping[str, str], other: Mapping[str, str]) -> str:
    if name not in other:
        return "in base alone"
    return "in head alone" if name not in one else "differs"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex() or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and one == other


def _text(value: Any) -> str:
    return f"{value.hex()} ({value!r})" if isinstance(value, float) else repr(value)
