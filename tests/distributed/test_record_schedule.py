"""--record-schedule on real ranks: the recorded order is the simulated one, and nothing that is trained changes."""

import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from megatron_ext.cli import show_run
from megatron_ext.plan.schedule import Work
from megatron_ext.plan.simulated_timeline import equal_stages
from megatron_ext.plan.timeline import COMMUNICATION, MESSAGES, Pass, slow_stages
from megatron_ext.telemetry import schedule_record
from megatron_ext.telemetry.schedule_record import RankRecord
from megatron_ext.train import step as train_step
from megatron_ext.verify.ranks import run_ranks
from tests.support.launched import reproducible_rows
from tests.support.program import run_program, tiny

TOOL = Path(__file__).parents[2] / "tools" / "draw_pipeline.py"
FLAGS = tiny("--train-iters 3 --eval-interval 2 --eval-iters 1 --log-interval 1")
RECORD = "--record-schedule --profile-step-start 2 --profile-step-end 4"
LAYOUTS = {
    "PP2": (2, "--pipeline-model-parallel-size 2 --global-batch-size 5"),
    "PP4 x 2": (
        4,
        "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 8 --timing-log-level 2 --log-communication-share "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "PP2 TP2": (
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 2 "
        "--use-distributed-optimizer",
    ),
}
SLOW, SLEEP = "PP2 TP2", 1.5  # the layout whose second stage sleeps in its forward passes, and how many seconds


def train(folder: str, flags: list[str], slow: bool = False) -> tuple[int, str]:
    plain, calls = train_step._forward_step, itertools.count()
    if slow:

        def late(batches: Any, model: Any, **how: Any) -> Any:
            if parallel_state.get_pipeline_model_parallel_rank() == 1 and model.training and 2 <= next(calls) < 6:
                time.sleep(SLEEP)  # in the steps that are recorded, each of two microbatches
            return plain(batches, model, **how)

        train_step._forward_step = late
    files = ["--metrics-file", f"{folder}/metrics.jsonl", "--tensorboard-dir", folder]
    ended = run_program([*FLAGS, *flags, *files])
    return ended.code, ended.errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, (ranks, flags) in LAYOUTS.items():
        for kind, added in (("recorded", RECORD), ("plain", "")):
            if kind == "plain" and name == SLOW:
                continue
            words = [*shlex.split(flags), *shlex.split(added)]
            assert run_ranks(ranks, train, str(folder / name / kind), words, name == SLOW) == [(0, "")] * ranks
    return folder


def records(folder: Path, name: str) -> list[RankRecord]:
    return schedule_record.read(folder / name / "recorded")


def works(passes: Iterable[Pass]) -> list[Work]:
    return [Work(each.forward, each.chunk, each.microbatch) for each in passes]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_recorded_order_is_the_simulated_one(folder: Path, name: str) -> None:
    found = records(folder, name)
    assert [record.position.rank for record in found] == list(range(LAYOUTS[name][0]))
    for record in found:
        place = record.position
        assert [step.iteration for step in record.steps] == [2, 3]
        for step in record.steps:
            microbatches = len({each.microbatch for each in step.passes})
            drawn = equal_stages(place.stages, place.chunks, microbatches, place.microbatch_group_size)
            assert works(step.passes) == works(drawn.lanes[place.stage].passes)
            assert len(step.passes) == 2 * place.chunks * microbatches


@pytest.mark.parametrize("name", LAYOUTS)
def test_passes_and_waits_follow_each_other_in_the_step(folder: Path, name: str) -> None:
    for record in records(folder, name):
        for step in record.steps:
            ends = [moment for each in step.passes for moment in (each.begin, each.end)]
            assert ends == sorted(ends)
            assert ends[0] >= 0.0
            assert ends[-1] <= step.total
            assert all(-1e-9 <= block.begin <= block.end <= step.total + 1e-9 for block in step.blocks)
            assert len(step.memory) == len(step.passes)
            assert all(held > 0 for _, held in step.memory)


def test_a_pass_waits_for_the_stage_before(folder: Path) -> None:
    """Times of different ranks agree: no forward pass begins before the one that it needs has ended."""
    for name in ("PP2", SLOW):
        lanes = schedule_record.timeline(records(folder, name)).lanes
        ends = {each.microbatch: each.end for each in lanes[0].passes if each.forward}
        begins = {each.microbatch: each.begin for each in lanes[1].passes if each.forward}
        assert all(begins[microbatch] > ends[microbatch] for microbatch in ends)


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {SLOW}))
def test_nothing_that_is_trained_changes(folder: Path, name: str) -> None:
    recorded, plain = (folder / name / kind / "metrics.jsonl" for kind in ("recorded", "plain"))
    assert reproducible_rows(recorded) == reproducible_rows(plain)
    assert not (folder / name / "plain" / "schedule").exists()


def test_only_the_ranks_that_are_named_write(tmp_path: Path) -> None:
    ranks, flags = LAYOUTS["PP2"]
    assert run_ranks(ranks, train, str(tmp_path), shlex.split(f"{flags} {RECORD} --profile-ranks 1")) == [(0, "")] * 2
    assert [path.name for path in (tmp_path / schedule_record.FOLDER).iterdir()] == ["rank1.json"]


def test_messages_and_collectives_are_told_apart(folder: Path) -> None:
    kinds = {
        name: {block.name for record in records(folder, name) for step in record.steps for block in step.blocks}
        for name in ("PP2", SLOW)
    }
    assert MESSAGES in kinds["PP2"]
    assert kinds[SLOW] == {MESSAGES, COMMUNICATION}


def test_a_slow_stage_is_named(folder: Path) -> None:
    timeline = schedule_record.timeline(records(folder, SLOW))
    assert [lane.name.split(" (")[0] for lane in timeline.lanes] == ["stage 0", "stage 1"]
    [sentence] = slow_stages(timeline.lanes)
    assert sentence.startswith("stage 1 (rank ")
    assert timeline.lanes[1].seconds(forward=True) > SLEEP
    assert timeline.lanes[0].seconds(forward=True) < SLEEP


def test_the_tool_draws_the_run_and_joins_its_traces(folder: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "pipeline.html", tmp_path / "all.json"
    command = [sys.executable, "-X", "importtime", str(TOOL), "--run", str(folder / SLOW / "recorded"), "--step", "2"]
    command += ["--width", "90", "--html", str(page), "--trace", str(trace)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert "| torch" not in run.stderr
    assert run.stdout.startswith("2 stages, 2 microbatches: measured, step 2, pipeline ")
    assert "stage 1 (rank 2) is slow" in run.stdout or "stage 1 (rank 3) is slow" in run.stdout
    assert page.read_text().count('class="pass ') == 2 * 2 * 2
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"stage {rank // 2}, rank {rank}" for rank in range(4)}
    assert sum(event.get("cat") == "pass" for event in events) == 4 * 2 * 2 * 2


def test_the_page_of_the_run_has_the_picture(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    assert show_run.main([str(folder / SLOW / "recorded"), "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 4 + 2 + 1, "curves, passes of the step, and the layout"
    assert text.count('class="pass ') == 2 * 2 * 2
    assert ") is slow: a microbatch takes " in text
    assert show_run.main([str(folder / "PP2" / "plain"), "--html", str(page)]) == 0
    assert page.read_text().count("<svg") == 4 + 1
