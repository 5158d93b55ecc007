"""Reads the traces of --record-schedule, which anybody may have written, as plain values whose types are checked.

    place, steps = read_trace(Path("out/schedule/rank0.json"))
    place["stages"], steps[0].passes[0]["dur"]

What is drawn of them takes time and room with what there is in the file, never with a number that it names.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.untrusted.text import TextError, boolean, fields, finite, integer, items, load_json, read_file, text

type Event = dict[str, Any]
"""An event in Chrome's format; its times are in microseconds."""

_MOST_BYTES = 1 << 28
_MOST_EVENTS = 1 << 21
_MOST_STAGES = 1 << 14
_MOST_RANKS = 1 << 24

_MICROSECONDS = finite(0.0, 1e15)
_ITERATION = fields({"iteration": integer()})
_PLACES = {
    "rank": integer(0, _MOST_RANKS),
    "world_size": integer(1, _MOST_RANKS),
    "stage": integer(0, _MOST_STAGES),
    "stages": integer(1, _MOST_STAGES),
    "chunks": integer(1, _MOST_STAGES),
    "microbatch_group_size": integer(),
}
_PLACE = fields(_PLACES)
_EVENTS = {
    "step": fields({"ts": _MICROSECONDS, "dur": finite(1e-3, 1e15), "args": _ITERATION}),
    "wait": fields({"ts": _MICROSECONDS, "dur": _MICROSECONDS, "args": _ITERATION, "name": text(100)}),
    "pass": fields(
        {
            "ts": _MICROSECONDS,
            "dur": _MICROSECONDS,
            "args": fields(
                {
                    "iteration": integer(),
                    "forward": boolean,
                    "chunk": integer(0, _MOST_STAGES),
                    "microbatch": integer(),
                },
                {"half": text(7)},
            ),
        }
    ),
    "memory": fields({"ts": _MICROSECONDS, "cat": text(20), "args": fields({"bytes": integer()})}),
}


@dataclass
class TracedStep:
    """The events of one step: when it was, and by kind what is in it, in the order of the file."""

    event: Event
    passes: list[Event]
    waits: list[Event]
    memory: list[Event]


def read_trace(path: Path) -> tuple[dict[str, int], list[TracedStep]]:
    """Return the place of a rank in its layout, and the steps that it has recorded.

    Raises:
        DataError: the file is no trace; names it and what in it is wrong.
    """
    try:
        trace = load_json(read_file(path, _MOST_BYTES))
        fields({"schedule": _PLACE, "traceEvents": items(_event, _MOST_EVENTS)})(trace)
        schedule = {name: trace["schedule"][name] for name in _PLACES}
        _check_place(schedule)
        return schedule, _steps(schedule, trace["traceEvents"])
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except TextError as error:
        raise DataError(f"{path} is no trace of --record-schedule ({error}). Record the run anew.") from error


def _event(event: Any) -> None:
    fields({})(event)
    check = _EVENTS.get(_kind(event))
    if check is not None:
        check(event)


def _kind(event: Event) -> str:
    """Return what an event tells of: a step, a pass, a wait or the memory; of others, something else."""
    return "memory" if event.get("ph") == "C" else str(event.get("cat"))


def _check_place(schedule: dict[str, int]) -> None:
    rank, stage, stages = schedule["rank"], schedule["stage"], schedule["stages"]
    if rank >= schedule["world_size"]:
        raise TextError(f"rank {rank} of {schedule['world_size']}")
    if stage >= stages or schedule["world_size"] % stages:
        raise TextError(f"stage {stage} of {stages}, on {schedule['world_size']} ranks")


def _steps(schedule: dict[str, int], events: list[Event]) -> list[TracedStep]:
    by_name: dict[str, TracedStep] = {}
    for event in events:
        if _kind(event) == "step":
            name = str(event["args"]["iteration"])
            if name in by_name:
                raise TextError(f"step {name} is in it twice")
            by_name[name] = TracedStep(event, [], [], [])
    for event in events:
        kind = _kind(event)
        if kind not in ("pass", "wait", "memory"):
            continue
        step = by_name.get(event["cat"] if kind == "memory" else str(event["args"]["iteration"]))
        if step is None:
            continue
        _check_times(step.event, event)
        if kind == "pass" and event["args"]["chunk"] >= schedule["chunks"]:
            raise TextError(f"chunk {event['args']['chunk']} of {schedule['chunks']}")
        {"pass": step.passes, "wait": step.waits, "memory": step.memory}[kind].append(event)
    return list(by_name.values())


def _check_times(step: Event, event: Event) -> None:
    """Check that an event is not far outside of its step: clocks of device and host may differ, but not by a step."""
    began, lasted = step["ts"], step["dur"]
    begin, end = event["ts"], event["ts"] + (event["dur"] if _kind(event) != "memory" else 0.0)
    if not began - lasted <= begin <= end <= began + 2.0 * lasted:
        raise TextError(
            f"step {step['args']['iteration']} is from {began:g} to {began + lasted:g} us, but something in it from "
            f"{begin:g} to {end:g} us"
        )
