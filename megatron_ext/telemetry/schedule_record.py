"""Writes and reads what --record-schedule recorded: a trace for Perfetto (or chrome://tracing) for each rank.

    schedule/rank0.json    {"traceEvents": [...], "schedule": {"rank": 0, "stage": 0, ...}}

The events are Chrome's trace events: a slice for each pass and each wait, and a counter of the memory. All ranks waited
for each other before a recorded step began, and its times count from there, so that traces can be laid one over the
other (`merged`). `timeline` makes the picture of one pipeline of them.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.durable import replace_text
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.plan.timeline import Block, Lane, Pass, Timeline
from megatron_ext.untrusted.traces import TracedStep, read_trace

FOLDER = "schedule"
"""Name of the folder of the traces, in that of the run."""

_MOST_NAMED = 32
_MICRO = 1e6  # a trace counts in microseconds


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank, in seconds since all ranks began it."""

    iteration: int
    offset: float
    """Seconds since all ranks began the first recorded step."""

    total: float
    passes: tuple[Pass, ...]
    """The passes in the order in which the rank ran them."""

    blocks: tuple[Block, ...]
    """Waits for collectives, and for messages between stages."""

    memory: tuple[tuple[float, int], ...]
    """(second, bytes) at the end of each pass."""


@dataclass(frozen=True)
class Place:
    """A rank's place in the layout of its run."""

    rank: int
    world_size: int
    stage: int
    stages: int
    chunks: int
    microbatch_group_size: int

    @property
    def pipeline(self) -> int:
        """The pipeline that the rank is in: ranks of a stage are neighbours (config/derived/rank_order.py)."""
        return self.rank % (self.world_size // self.stages)


@dataclass(frozen=True)
class RankRecord:
    """Everything that one rank recorded."""

    position: Place
    steps: tuple[RecordedStep, ...]


def write(folder: Path, record: RankRecord) -> Path:
    """Write the trace of a rank and return its path.

    Raises:
        StorageError: the file cannot be written.
    """
    path = folder / f"rank{record.position.rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"traceEvents": events(record), "schedule": asdict(record.position)}) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write the trace {path}: {error.strerror}. Leave out --record-schedule.") from error
    return path


def read(run: Path) -> list[RankRecord]:
    """Return the records of all ranks, given the folder of a run or that of its traces.

    Raises:
        ConfigurationError: there is no trace.
        DataError: a trace cannot be read.
    """
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    paths = sorted(folder.glob("rank*.json"), key=_rank_of)
    if not paths:
        raise ConfigurationError(
            f"{folder}: no traces (rank0.json and so on). Run a few steps with --record-schedule --profile-step-start "
            "5 --profile-step-end 7, and give the folder of --save."
        )
    records = [_record(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if replace(record.position, rank=0, stage=0) != replace(records[0].position, rank=0, stage=0):
            raise DataError(f"{path} is of another layout than {paths[0]}; remove the traces of one of the runs")
    return records


def merged(records: Iterable[RankRecord]) -> str:
    """Return one trace of all ranks, as text."""
    return json.dumps({"traceEvents": [event for record in records for event in events(record)]}) + "\n"


def timeline(records: Sequence[RankRecord], iteration: int | None = None, pipeline: int | None = None) -> Timeline:
    """Return the picture of one step of one pipeline.

    Args:
        iteration: number of the step; by default the last one that was recorded, which is past what happens once.
        pipeline: which of the pipelines that run next to each other; by default the one with the stage that works
            longest.
    Raises:
        ConfigurationError: there is no such step or pipeline, or a rank of it is missing.
    """
    steps = {step.iteration for record in records for step in record.steps}
    wanted = iteration if iteration is not None else max(steps, default=0)
    if wanted not in steps:
        raise ConfigurationError(f"step {wanted} was not recorded; there are {_list(steps)}")
    pipelines = _pipelines(records, wanted)
    if pipeline is None:
        pipeline = max(pipelines, key=lambda number: max(lane.worked for lane, _ in pipelines[number].values()))
    if pipeline not in pipelines:
        raise ConfigurationError(f"there is no pipeline {pipeline}; there are {_list(pipelines)}")
    of_stages, position = pipelines[pipeline], records[0].position
    missing = set(range(position.stages)) - set(of_stages)
    if missing:
        raise ConfigurationError(
            f"pipeline {pipeline}: no trace of stage {_list(missing)} of {position.stages}; record all ranks "
            "(leave out --profile-ranks)"
        )
    lanes = tuple(of_stages[stage][0] for stage in sorted(of_stages))
    microbatches = len({each.microbatch for each in lanes[0].passes})
    chunks = f" x {position.chunks} chunks" if position.chunks > 1 else ""
    of = f", pipeline {pipeline} of {len(pipelines)}" if len(pipelines) > 1 else ""
    return Timeline(
        title=f"{position.stages} stages{chunks}, {microbatches} microbatches: measured, step {wanted}{of}",
        lanes=lanes,
        chunks=position.chunks,
        total=max(step.total for _, step in of_stages.values()),
    )


def events(record: RankRecord) -> list[dict[str, Any]]:
    """Return a rank's trace events."""
    at, rank = record.position, record.position.rank
    lines: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"stage {at.stage}, rank {rank}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": at.stage * 1000 + rank}},
        {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "passes"}},
        {"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": {"name": "waits"}},
        {"ph": "M", "pid": rank, "tid": 2, "name": "thread_name", "args": {"name": "steps"}},
    ]
    for step in record.steps:
        of_step = {"iteration": step.iteration}
        for each in step.passes:
            kind, chunk = "forward" if each.forward else "backward", f" chunk {each.chunk}" if at.chunks > 1 else ""
            half = {"half": each.half} if each.half else {}
            args = {**of_step, "forward": each.forward, "chunk": each.chunk, "microbatch": each.microbatch, **half}
            name = " ".join([kind, *half.values(), str(each.microbatch)]) + chunk
            lines.append(_slice(step, rank, 0, "pass", name, each.begin, each.end) | {"args": args})
        lines += [
            _slice(step, rank, 1, "wait", block.name, block.begin, block.end) | {"args": of_step}
            for block in step.blocks
        ]
        lines += [
            {
                "ph": "C",
                "pid": rank,
                "name": "memory",
                "ts": (step.offset + second) * _MICRO,
                "args": {"bytes": bytes_now},
                "cat": str(step.iteration),
            }
            for second, bytes_now in step.memory
        ]
        lines.append(_slice(step, rank, 2, "step", f"step {step.iteration}", 0.0, step.total) | {"args": of_step})
    return lines


def _slice(step: RecordedStep, rank: int, row: int, kind: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": row,
        "cat": kind,
        "name": name,
        "ts": (step.offset + begin) * _MICRO,
        "dur": (end - begin) * _MICRO,
    }


def _record(path: Path) -> RankRecord:
    position, steps = read_trace(path)
    return RankRecord(Place(**position), tuple(_step(step) for step in steps))


def _step(step: TracedStep) -> RecordedStep:
    began = float(step.event["ts"])

    def second(micros: float) -> float:
        return (micros - began) / _MICRO

    def span(event: dict[str, Any]) -> tuple[float, float]:
        return second(event["ts"]), second(event["ts"] + event["dur"])

    return RecordedStep(
        step.event["args"]["iteration"],
        began / _MICRO,
        step.event["dur"] / _MICRO,
        tuple(
            Pass(args["forward"], args["chunk"], args["microbatch"], *span(each), args.get("half", ""))
            for each in step.passes
            for args in [each["args"]]
        ),
        tuple(Block(each["name"], *span(each)) for each in step.waits),
        tuple((second(each["ts"]), each["args"]["bytes"]) for each in step.memory),
    )


def _pipelines(records: Sequence[RankRecord], iteration: int) -> dict[int, dict[int, tuple[Lane, RecordedStep]]]:
    """Return the lanes of each pipeline, by number and stage."""
    pipelines: dict[int, dict[int, tuple[Lane, RecordedStep]]] = {}
    for record in records:
        at = record.position
        for step in record.steps:
            if step.iteration == iteration:
                name = f"stage {at.stage}" + (f" (rank {at.rank})" if at.world_size > at.stages else "")
                lane = Lane(name, step.passes, step.blocks, step.memory)
                pipelines.setdefault(at.pipeline, {})[at.stage] = lane, step
    return pipelines


def _list(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:_MOST_NAMED])) + (" and more" if len(ordered) > _MOST_NAMED else "")


def _rank_of(path: Path) -> int:
    digits = re.search(r"\d+", path.stem)
    return int(digits[0]) if digits else -1
