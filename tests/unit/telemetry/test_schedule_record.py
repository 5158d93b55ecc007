"""Traces of --record-schedule: what is written is read, and what is missing or damaged is said."""

import dataclasses
import itertools
import json
import math
import reprlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.cli import draw_pipeline, show_run
from megatron_ext.config.resolve import Facts
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.plan.timeline import COMMUNICATION, Block, Pass, as_text, slow_stages
from megatron_ext.plan.timeline_svg import as_page
from megatron_ext.rules.observation_rules import recorded_steps_are_trained
from megatron_ext.telemetry import schedule_record
from megatron_ext.telemetry.schedule_record import Place, RankRecord, RecordedStep, merged, read, timeline, write
from megatron_ext.train.callbacks.profiling import folder
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.pages import HOSTILE, texts
from tests.support.samples import recorded_rank as record
from tests.support.small_models import small_config
from tests.support.small_runs import MODEL


def write_all(folder: Path, records: list[RankRecord]) -> Path:
    for each in records:
        write(folder / schedule_record.FOLDER, each)
    return folder


def close(first: RecordedStep, second: RecordedStep) -> bool:
    def numbers(step: RecordedStep) -> list[float]:
        moments = [moment for each in (*step.passes, *step.blocks) for moment in (each.begin, each.end)]
        return [step.offset, step.total, *moments, *(second for second, _ in step.memory)]

    def names(step: RecordedStep) -> list[object]:
        held = [size for _, size in step.memory]
        return [step.iteration, [each[:3] for each in step.passes], [block.name for block in step.blocks], held]

    return names(first) == names(second) and numbers(first) == pytest.approx(numbers(second), abs=1e-9)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = [record(rank) for rank in range(4)]
    found = read(write_all(tmp_path, written))
    assert [each.position for each in found] == [each.position for each in written]
    for theirs, ours in zip(found, written, strict=True):
        assert all(close(*steps) for steps in zip(theirs.steps, ours.steps, strict=True))


def test_every_row_of_the_joined_trace_has_a_name() -> None:
    """Perfetto shows a row without one as a thread with a number."""
    events = json.loads(merged([record(rank) for rank in range(4)]))["traceEvents"]
    named = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in events if each["ph"] == "X"} == set(named)
    assert [named[3, row] for row in range(3)] == ["passes", "waits", "steps"]


def test_ranks_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    written = [record(rank, world_size=12) for rank in range(12)]
    assert [each.position.rank for each in read(write_all(tmp_path, written))] == list(range(12))


def test_the_busiest_pipeline_is_drawn_and_its_slow_stage_named(tmp_path: Path) -> None:
    found = read(write_all(tmp_path, [record(0), record(1), record(2), record(3, slower=1.6)]))
    drawn = timeline(found)
    assert drawn.title == "2 stages x 2 chunks, 4 microbatches: measured, step 11, pipeline 1 of 2"
    assert [lane.name for lane in drawn.lanes] == ["stage 0 (rank 1)", "stage 1 (rank 3)"]
    assert slow_stages(drawn.lanes) == [
        "stage 1 (rank 3) is slow: a microbatch takes 4.8 ms there, 1.60 times the 3 ms of the other stages."
    ]
    other = timeline(found, 10, 0)
    assert slow_stages(other.lanes) == []
    assert "-" in as_text(other)[4], "a collective is drawn in its pass"
    assert as_page(other).count('class="block communication"') == 2


def test_one_trace_of_all_ranks() -> None:
    events = json.loads(merged([record(rank) for rank in range(4)]))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1, 2, 3}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    starts = [event["ts"] for event in slices if event["cat"] == "step" and event["pid"] == 2]
    assert starts == [0.0, 250_000.0], "steps stand where they were"


def test_the_events_of_a_rank() -> None:
    """In microseconds since all ranks began the first step; rank 5 of 8, in the second of four stages."""
    passes = (Pass(True, 1, 2, 0.5, 1.0), Pass(False, 0, 3, 1.5, 3.5))
    blocks = (Block(COMMUNICATION, 1.0, 1.25),)
    step = RecordedStep(7, 100.0, 4.0, passes, blocks, ((1.0, 10), (3.5, 20)))
    joined, *places = [], Place(5, 8, 2, 4, 2, 4), Place(5, 8, 2, 4, 1, 4)
    for place, names in zip(
        places, (("forward 2 chunk 1", "backward 3 chunk 0"), ("forward 2", "backward 3")), strict=True
    ):
        joined = json.loads(merged([RankRecord(place, (step,))]))["traceEvents"]
        assert [each["name"] for each in joined if each.get("cat") == "pass"] == list(names)
    heads, rest = joined[:5], joined[5:]
    assert [(head["name"], head.get("tid"), *head["args"].values()) for head in heads] == [
        ("process_name", None, "stage 2, rank 5"),
        ("process_sort_index", None, 2005),
        ("thread_name", 0, "passes"),
        ("thread_name", 1, "waits"),
        ("thread_name", 2, "steps"),
    ]
    assert {each["pid"] for each in joined} == {5}
    shown = [(each["ph"], each.get("tid"), each["cat"], each["name"], each["ts"], each.get("dur")) for each in rest]
    assert shown == [
        ("X", 0, "pass", "forward 2", 100.5e6, 0.5e6),
        ("X", 0, "pass", "backward 3", 101.5e6, 2e6),
        ("X", 1, "wait", "communication", 101e6, 0.25e6),
        ("C", None, "7", "memory", 101e6, None),
        ("C", None, "7", "memory", 103.5e6, None),
        ("X", 2, "step", "step 7", 100e6, 4e6),
    ]
    assert [each["args"] for each in rest] == [
        {"iteration": 7, "forward": True, "chunk": 1, "microbatch": 2},
        {"iteration": 7, "forward": False, "chunk": 0, "microbatch": 3},
        {"iteration": 7},
        {"bytes": 10},
        {"bytes": 20},
        {"iteration": 7},
    ]


def test_pipelines_are_of_ranks_that_are_a_stage_apart() -> None:
    """8 ranks in 4 stages: ranks 0 and 1 are the first stage of two pipelines."""
    assert [Place(rank, 8, rank // 2, 4, 1, 4).pipeline for rank in range(8)] == [0, 1] * 4
    assert [Place(rank, 6, rank // 3, 2, 1, 2).pipeline for rank in range(6)] == [0, 1, 2] * 2
    assert [Place(rank, 3, rank, 3, 1, 3).pipeline for rank in range(3)] == [0] * 3


def test_the_stage_that_works_longest_chooses_the_pipeline_and_the_last_step_is_drawn() -> None:
    """Not the pipeline that works longest in all: its stages may be even."""

    def of(rank: int, work: float, total: float) -> RankRecord:
        steps = (RecordedStep(at, 0.0, total + at, (Pass(True, 0, 0, 0.0, work),), (), ()) for at in (0, 1))
        return RankRecord(Place(rank, 4, rank // 2, 2, 1, 2), tuple(steps))

    records = [of(0, 3.0, 10.0), of(1, 4.0, 20.0), of(2, 3.0, 40.0), of(3, 1.0, 30.0)]
    drawn = timeline(records)
    assert drawn.title == "2 stages, 1 microbatches: measured, step 1, pipeline 1 of 2"
    assert (drawn.total, drawn.chunks) == (31.0, 1), "the step of the slower rank"
    assert timeline(records, 0).title.endswith("step 0, pipeline 1 of 2"), "0 is a step"
    assert timeline(records, 1, 0).total == 41.0
    assert timeline(records, 1, 0).title.endswith("step 1, pipeline 0 of 2")
    alone = [RankRecord(Place(rank, 2, rank, 2, 1, 2), each.steps) for rank, each in enumerate(records[:2])]
    assert timeline(alone).title == "2 stages, 1 microbatches: measured, step 1"
    assert [lane.name for lane in timeline(alone).lanes] == ["stage 0", "stage 1"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--record-schedule"):
        read(tmp_path)
    found = [record(rank) for rank in range(4)]
    with pytest.raises(ConfigurationError, match="step 7 was not recorded; there are 10, 11"):
        timeline(found, 7)
    with pytest.raises(ConfigurationError, match="no pipeline 2; there are 0, 1"):
        timeline(found, 10, 2)
    with pytest.raises(ConfigurationError, match=r"no trace of stage 1 of 2.*--profile-ranks"):
        timeline(found[:1])


@pytest.mark.parametrize(
    "text", ["{", "[]", "5", '{"schedule": {}, "traceEvents": []}', '{"schedule": {"rank": 0}}', "[" * 5000]
)
def test_a_damaged_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank0.json").write_text(text)
    with pytest.raises(DataError, match=r"rank0\.json"):
        read(tmp_path)


_LARGE = 10**400
_PLACES: dict[str, tuple[Any, ...]] = {
    "rank": (1, -1, _LARGE, "a"),
    "world_size": (0, 10**9, None),
    "stage": (1, -1, 1.5),
    "stages": (0, 2, -1, 10**9, "a", _LARGE),
    "chunks": (0, 10**9, "a", None),
    "microbatch_group_size": (None, "a"),
}
_TIMES = (math.nan, math.inf, -1.0, "a", None, [], 1e300, _LARGE)
_EVENTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "pass": {
        "ts": (*_TIMES, 1e9),
        "dur": (*_TIMES, 1e9),
        "args": ([], None, {}, {"iteration": 7, "forward": "no", "chunk": 0, "microbatch": 0}),
        "args.chunk": (1, -1, "a", _LARGE),
        "args.microbatch": (-1, "x", _LARGE),
        "args.iteration": ("a", _LARGE),
    },
    "wait": {"ts": (*_TIMES, 1e9), "dur": _TIMES, "name": (5, None, [], "x" * 101), "args": (5,)},
    "memory": {"ts": (*_TIMES, 1e9), "cat": (7, None), "args": (5, {}), "args.bytes": (-1, 1.5, "a", _LARGE)},
    "step": {"ts": _TIMES, "dur": (*_TIMES, 0.0, 5e-324), "args": (None, []), "args.iteration": (-1, "a", _LARGE)},
}


def whole_trace() -> dict[str, Any]:
    """One step with a pass, a wait and the memory after it."""
    passes, blocks = (Pass(True, 0, 0, 0.5, 1.0),), (Block(COMMUNICATION, 0.5, 0.75),)
    step = RecordedStep(7, 0.0, 1.0, passes, blocks, ((1.0, 10),))
    place = Place(0, 1, 0, 1, 1, 1)
    return {"traceEvents": schedule_record.events(RankRecord(place, (step,))), "schedule": dataclasses.asdict(place)}


def bad_traces() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, values in _PLACES.items():
        for value in values:
            trace = whole_trace()
            trace["schedule"][name] = value
            yield f"{name} {reprlib.repr(value)}", trace
    for kind, fields in _EVENTS.items():
        for name, values in fields.items():
            for value in values:
                trace = whole_trace()
                [event] = [each for each in trace["traceEvents"] if kind in (each.get("cat"), each["name"])]
                *path, last = name.split(".")
                (event[path[0]] if path else event)[last] = value
                yield f"{kind} {name} {reprlib.repr(value)}", trace
    twice = whole_trace()
    yield "a step twice", {**twice, "traceEvents": twice["traceEvents"] * 2}
    for value in ("a", {}, [1], [[]]):
        yield f"events {value}", {**whole_trace(), "traceEvents": value}


BAD = dict(bad_traces())


def write_run(folder: Path, trace: Any) -> None:
    """Write a run that has one step and this trace."""
    (folder / schedule_record.FOLDER).mkdir(exist_ok=True)
    (folder / schedule_record.FOLDER / "rank0.json").write_text(json.dumps(trace))
    (folder / "metrics.jsonl").write_text('{"iteration": 7, "lm_loss": 2.0, "consumed_tokens": 8}\n')


@pytest.mark.parametrize("name", BAD)
def test_a_trace_that_is_none_ends_with_one_sentence(name: str, tmp_path: Path) -> None:
    """Both programs that read one end with exit code 65 (DataError)."""
    write_run(tmp_path, BAD[name])
    for program, words in ((draw_pipeline, ["--run"]), (show_run, ["--html", str(tmp_path / "page.html")])):
        with pytest.raises(DataError, match=r"^\S*rank0\.json is no trace of --record-schedule \(") as caught:
            program.main([*words, str(tmp_path)])
        assert caught.value.exit_code == 65
        assert len(str(caught.value)) < 1000


def test_what_is_whole_is_drawn_and_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, hostile = whole_trace(), HOSTILE.replace("\udcff", "")
    for event in trace["traceEvents"]:
        if event.get("cat") == "wait":
            event["name"] = hostile
    trace["traceEvents"] += [{"cat": ["pass"]}, {"cat": "x", "args": 5}, {"ph": "M", "name": hostile}]
    write_run(tmp_path, trace)
    page = tmp_path / "page.html"
    for program, words in ((draw_pipeline, ["--run"]), (show_run, [])):
        assert program.main([*words, str(tmp_path), "--html", str(page)]) == 0
        assert "<script>alert(1)</script>" in texts(page.read_text())
    assert "\x1b" not in capsys.readouterr().out


def test_traces_of_two_runs_are_not_laid_over_each_other(tmp_path: Path) -> None:
    write_all(tmp_path, [record(0), record(1, world_size=8)])
    with pytest.raises(DataError, match=r"rank1\.json is of another layout than \S*rank0\.json; remove the traces"):
        read(tmp_path)


def test_many_steps_are_read_in_the_time_of_their_events(tmp_path: Path) -> None:
    """Each of 20,000 steps looks at its own events alone."""
    steps = tuple(RecordedStep(at, at * 1.0, 1.0, (Pass(True, 0, 0, 0.0, 1.0),), (), ()) for at in range(20_000))
    write(tmp_path, RankRecord(Place(0, 1, 0, 1, 1, 1), steps))
    began = time.process_time()
    [found] = read(tmp_path)
    assert len(found.steps) == 20_000
    assert time.process_time() - began < 10.0
    with pytest.raises(ConfigurationError, match=r"there are 0, 1, .*, 31 and more$"):
        timeline([found], 99_999)


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "schedule").write_text("a file")
    with pytest.raises(StorageError, match=r"rank0\.json.*--record-schedule"):
        write(tmp_path / "schedule", record(0))


RECORD = [*MODEL, *shlex.split("--train-iters 5 --record-schedule --profile-step-start 2 --profile-step-end 4")]


@pytest.mark.parametrize(("flags", "steps"), [("", [2, 3]), ("--profile-ranks 0", [2, 3]), ("--exit-interval 2", [2])])
def test_a_run_writes_the_steps_of_the_range_that_it_has(flags: str, steps: list[int], tmp_path: Path) -> None:
    written: list[int] = []

    class Looks(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            written.extend([trainer.position.iteration] * (tmp_path / schedule_record.FOLDER).exists())

    pretrain([*RECORD, "--save", str(tmp_path), *flags.split()], callbacks=[Looks])
    assert written == ([3, 4] if len(steps) == 2 else []), "after the last step of the range, or at the end"
    [found] = read(tmp_path)
    assert [step.iteration for step in found.steps] == steps


@pytest.mark.parametrize("failing", [1, 3])
def test_a_run_that_fails_leaves_torchs_operations_as_they_were(failing: int, tmp_path: Path) -> None:
    """Before the range and within it; nothing of the step that failed is written."""
    before, passes = dict(vars(torch.distributed.ProcessGroup)), itertools.count(2)  # of two microbatches each step

    def loss(token: Any) -> torch.Tensor:
        if next(passes) // 2 == failing:
            raise KeyboardInterrupt
        return token.cross_entropy()

    with pytest.raises(KeyboardInterrupt):
        pretrain([*RECORD, "--save", str(tmp_path), "--eval-iters", "0"], loss=loss)
    assert dict(vars(torch.distributed.ProcessGroup)) == before
    assert not (tmp_path / schedule_record.FOLDER).exists()


@pytest.mark.parametrize(
    ("save", "events", "expected"), [("s", "t", "s"), ("s", None, "s"), (None, "t", "t"), (None, None, ".")]
)
def test_traces_lie_next_to_the_checkpoints(save: str | None, events: str | None, expected: str) -> None:
    config = small_config()
    config = dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, save=save),
        logging=dataclasses.replace(config.logging, tensorboard_dir=events),
    )
    assert folder(config) == Path(expected) / schedule_record.FOLDER


@pytest.mark.parametrize(("trained", "is_refused"), [(0, False), (4, True), (5, False), (6, False), (None, False)])
def test_a_range_that_begins_with_the_last_step_is_recorded(trained: int | None, is_refused: bool) -> None:
    """Steps are counted from 1: of 5, the fifth is one."""
    config = small_config()
    steps = {"record_schedule": True, "profile_step_start": 5, "profile_step_end": 7}
    config = dataclasses.replace(
        config,
        profiling=dataclasses.replace(config.profiling, **steps),
        training=dataclasses.replace(config.training, train_iters=trained),
    )
    assert bool(list(recorded_steps_are_trained(config, Facts()))) is is_refused
