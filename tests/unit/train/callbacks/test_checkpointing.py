"""Extras of the loop by themselves: when they evaluate, save, compare and stop, on a trainer made by hand."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_ext.errors import NumericError, StorageError
from megatron_ext.train.callbacks import checkpointing, evaluation, replicas, reporting, standard, stopping
from megatron_ext.train.callbacks.checkpointing import Checkpointing
from megatron_ext.train.callbacks.communication import Communication
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.profiling import Profiling
from megatron_ext.train.callbacks.replicas import ReplicaCheck
from megatron_ext.train.callbacks.reporting import Reporting
from megatron_ext.train.callbacks.snapshots import Snapshots
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.train.callbacks.stragglers import Stragglers
from megatron_ext.train.callbacks.tasks import Samples, Tasks
from megatron_ext.train.state import TrainState
from megatron_ext.train.trainer import Callback
from tests.support.small_models import small_config

NOTHING: Any = None


def _trainer(iteration: int, *, finished: bool = False) -> Any:
    state = SimpleNamespace(iteration=iteration, consumed_samples=8 * iteration)
    config = SimpleNamespace(training=SimpleNamespace(skip_train=False))
    run = SimpleNamespace(state=state, config=config, world_size=1, is_last_rank=True, rank=0)
    return SimpleNamespace(run=run, finished=finished, report_evaluation=lambda metrics: None)


def _evaluated(
    monkeypatch: pytest.MonkeyPatch, start: int, last: int, *, finished: bool, at_start: bool = False, first: int = 0
) -> list[tuple[str, int]]:
    """The iterations at which the data is evaluated, every third and at the end."""
    seen: list[tuple[str, int]] = []

    def losses(run: Any, data: Any) -> Any:
        seen.append((data, run.state.iteration))
        return SimpleNamespace(all=1.0, parts=())

    monkeypatch.setattr(evaluation, "evaluate_sources", lambda run, data: losses(run, "valid"))
    monkeypatch.setattr(evaluation, "evaluate", lambda run, data: losses(run, "test").all)
    valid: Any = SimpleNamespace(parts=())
    callback = Evaluation(valid, valid, 3, None, at_start=at_start, first=first)
    trainer = _trainer(start)
    callback.on_start(trainer)
    for iteration in range(start + 1, last + 1):
        trainer.run.state.iteration = iteration
        callback.on_step_end(trainer, NOTHING)
    trainer.finished = finished
    callback.on_end(trainer)
    return seen


def test_when_it_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end once, and only if it is the planned one; before the first step only where there was none."""
    assert _evaluated(monkeypatch, 0, 7, finished=True) == [("valid", 3), ("valid", 6), ("valid", 7), ("test", 7)]
    assert _evaluated(monkeypatch, 0, 6, finished=True) == [("valid", 3), ("valid", 6), ("test", 6)]
    assert _evaluated(monkeypatch, 0, 4, finished=False) == [("valid", 3)]
    assert _evaluated(monkeypatch, 0, 4, finished=False, at_start=True) == [("valid", 0), ("valid", 3)]
    assert _evaluated(monkeypatch, 4, 6, finished=False, at_start=True) == [("valid", 6)]
    assert _evaluated(monkeypatch, 0, 6, finished=False, first=6) == [("valid", 6)]
    assert _evaluated(monkeypatch, 0, 6, finished=False, first=7) == []


@pytest.mark.parametrize(
    ("known", "skip_train", "seen"),
    [
        ({"validation_loss": 1.0, "test_loss": 1.0}, False, []),
        ({"validation_loss": 1.0}, False, ["test"]),
        ({"validation_loss": 1.0, "test_loss": 1.0}, True, ["valid", "test"]),
    ],
)
def test_a_finished_run_evaluates_what_its_file_lacks(
    known: dict[str, float], skip_train: bool, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --skip-train, which asks for nothing but an evaluation, everything."""
    done: list[str] = []
    losses = SimpleNamespace(all=1.0, parts=())
    monkeypatch.setattr(evaluation, "evaluate_sources", lambda run, data: done.append("valid") or losses)
    monkeypatch.setattr(evaluation, "evaluate", lambda run, data: done.append("test") or 1.0)
    monkeypatch.setattr(evaluation, "read_rows", lambda path: [{"iteration": 6, **known}, {"iteration": 3}])
    valid: Any = SimpleNamespace(parts=())
    callback, trainer = Evaluation(valid, valid, 3, "metrics.jsonl", at_start=False), _trainer(6, finished=True)
    trainer.run.config.training.skip_train = skip_train
    callback.on_start(trainer)
    callback.on_end(trainer)
    assert done == seen


class _Save:
    """A save that is written when it is told to be."""

    log: ClassVar[list[str]] = []
    kept: ClassVar[list[Any]] = []
    is_written = False

    def __init__(self, run: Any, folder: str, *, background: bool, kept: Any):
        self.run, self.iteration = run, run.state.iteration
        self.kept.append(kept)
        self.log.append(f"begin {self.iteration}")

    def written(self) -> bool:
        return self.is_written

    def hold_update(self) -> None:
        self.log.append(f"hold for {self.iteration}")

    def finish(self) -> Path:
        self.log.append(f"finish {self.iteration}")
        return Path(f"iter_{self.iteration}")


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(checkpointing, "Save", _Save)
    monkeypatch.setattr(_Save, "log", [])
    monkeypatch.setattr(_Save, "kept", [])
    monkeypatch.setattr(_Save, "is_written", False)
    return _Save.log


def _saving(interval: int | None, start: int, last: int, *, background: bool) -> tuple[Checkpointing, Any]:
    callback, trainer = Checkpointing("folder", interval, background=background), _trainer(start)
    callback.on_start(trainer)
    for iteration in range(start + 1, last + 1):
        trainer.run.state.iteration = iteration
        callback.on_step_end(trainer, NOTHING)
    return callback, trainer


def test_the_end_saves_what_is_not_saved_yet(saves: list[str]) -> None:
    for interval, start, last, expected in ((2, 0, 3, [2, 3]), (2, 0, 4, [2, 4]), (None, 0, 3, [3]), (2, 4, 4, [])):
        saves.clear()
        callback, trainer = _saving(interval, start, last, background=False)
        callback.on_end(trainer)
        assert saves == [f"{what} {iteration}" for iteration in expected for what in ("begin", "finish")]


def test_one_background_save_ends_before_the_next_begins(saves: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    callback, trainer = _saving(2, 0, 3, background=True)
    assert saves == ["begin 2"], "one that is not written yet goes on"
    trainer.run.state.iteration = 4
    callback.on_step_end(trainer, NOTHING)
    assert saves == ["begin 2", "finish 2", "begin 4"]
    first, second = _Save.kept
    assert first is second, "the plan and the memory of the first save serve all of them"
    monkeypatch.setattr(_Save, "is_written", True)
    trainer.run.state.iteration = 5
    callback.on_step_end(trainer, NOTHING)
    assert saves[3:] == ["finish 4"], "as soon as all ranks have written"
    callback.on_end(trainer)
    assert saves[4:] == ["begin 5", "finish 5"]


def test_the_time_of_a_save_is_its_own(saves: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins when the save before has ended; the training waits for what the save itself does at once."""
    now, said = [0.0], []
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(checkpointing, "say", said.append)

    def takes(name: str, seconds: float) -> None:
        action = getattr(_Save, name)

        def slow(*given: Any, **named: Any) -> Any:
            now[0] += seconds
            return action(*given, **named)

        monkeypatch.setattr(_Save, name, slow)

    takes("__init__", 2.0)
    takes("finish", 10.0)
    callback, trainer = _saving(2, 0, 4, background=True)
    callback.on_end(trainer)
    stopped = "in 12.0 s (in the background; training stopped for 2.0 s)"
    assert said == [f"checkpoint: saved iter_{iteration} {stopped}" for iteration in (2, 4)]


def test_an_update_begins_when_the_weights_are_copied(saves: list[str]) -> None:
    callback, trainer = _saving(2, 0, 1, background=True)
    callback.before_update(trainer)
    assert saves == [], "nothing is copied"
    trainer.run.state.iteration = 2
    callback.on_step_end(trainer, NOTHING)
    callback.before_update(trainer)
    callback.on_end(trainer)
    callback.before_update(trainer)
    assert saves == ["begin 2", "hold for 2", "finish 2"]


@pytest.mark.parametrize(
    ("error", "finishes"), [(NumericError("NaN"), True), (StorageError("full"), False), (KeyboardInterrupt(), False)]
)
def test_a_background_save_is_finished_only_where_all_ranks_are_there(
    error: BaseException, finishes: bool, saves: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are after a numeric error, which every rank raises; after any other the collective might wait for ever."""
    callback, trainer = _saving(2, 0, 2, background=True)
    callback.on_failure(trainer, error)
    assert saves == ["begin 2", *(["finish 2"] if finishes else [])]
    assert ("the background save of iteration 2 was not finished" in capsys.readouterr().err) != finishes
    callback, trainer = _saving(2, 0, 2, background=True)
    trainer.run.rank = 1
    callback.on_failure(trainer, error)
    assert capsys.readouterr().err == "", "one rank says it"


def test_the_last_good_comparison_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each check by itself; a run that goes on from a checkpoint was good there."""
    told: list[tuple[str, int, int]] = []
    for name, which in (("check_data_parallel_replicas", "replicas"), ("check_model_parallel_copies", "copies")):
        monkeypatch.setattr(
            replicas, name, lambda run, good, which=which: told.append((which, run.state.iteration + 1, good))
        )
    callback, trainer = ReplicaCheck(3, 2), _trainer(4)
    callback.on_start(trainer)
    for iteration in range(4, 9):
        trainer.run.state.iteration = iteration
        callback.before_update(trainer)
    assert told == [("replicas", 6, 4), ("copies", 6, 4), ("copies", 8, 5), ("replicas", 9, 5)]


def test_the_deadline_is_in_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert Stopping(NOTHING, None, 2.5).deadline == 1150.0
    assert Stopping(NOTHING, None, None).deadline is None


def _standard(monkeypatch: pytest.MonkeyPatch, **groups: dict[str, Any]) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """The arguments of the callbacks that flags ask for, by class, in the order of the list."""
    made: dict[str, tuple[tuple[Any, ...], Any]] = {}
    names = ("Status", "Profiling", "Reporting", "ReplicaCheck", "SpikeCheck", "GarbageCollection", "Evaluation")
    for name in (*names, "Timing"):
        monkeypatch.setattr(standard, name, lambda *given, name=name, **named: made.update({name: (given, named)}))
    monkeypatch.setattr(standard, "Stopping", lambda *given, **named: made.update(Stopping=(given, named)))
    monkeypatch.setattr(checkpointing, "Checkpointing", lambda *given, **named: made.update(Saves=(given, named)))
    monkeypatch.setattr(standard, "StepProfiler", SimpleNamespace(from_config=lambda *_: "profiler"))
    config = small_config(training={"train_iters": 10, "eval_interval": 7, **groups.pop("training", {})})
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    run: Any = SimpleNamespace(
        config=config, device=NOTHING, groups=SimpleNamespace(pp=NOTHING), rank=0, is_last_rank=False, recorder=None
    )
    run.loaders, run.timers = SimpleNamespace(valid="valid", test="test"), "timers"
    standard.standard_callbacks(run, "signals", "status")  # pyright: ignore[reportArgumentType]
    return made


def test_flags_reach_the_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _standard(monkeypatch)
    assert list(made) == ["Status", "Profiling", "Reporting", "ReplicaCheck", "Evaluation", "Stopping"]
    assert made["Evaluation"] == (("valid", "test", 7, None), {"at_start": False, "first": 0})
    assert made["Stopping"] == (("signals", None, None), {"elastic": False})
    training = {
        "start_eval_at_iter": 3,
        "eval_at_start": True,
        "spike_threshold": 2.5,
        "manual_gc": True,
        "manual_gc_interval": 4,
        "check_weight_hash_across_dp_replicas_interval": 5,
        "check_replicated_weights_interval": 6,
        "exit_interval": 8,
        "exit_duration_in_mins": 9.0,
    }
    saves = {"save": "folder", "save_interval": 11}
    made = _standard(monkeypatch, training=training, checkpoint=saves, layout={"elastic": True})
    assert made["Evaluation"][1] == {"at_start": True, "first": 3}
    assert made["Stopping"] == (("signals", 8, 9.0), {"elastic": True})
    assert made["ReplicaCheck"][0] == (5, 6)
    assert made["SpikeCheck"][0] == (2.5,)
    assert made["GarbageCollection"][0] == (4, 7)
    assert made["Saves"] == (("folder", 11), {"background": False})
    assert list(made)[-2:] == ["Stopping", "Saves"]
    quiet = {"manual_gc": True, "no_manual_gc_eval": True}
    made = _standard(monkeypatch, training=quiet, checkpoint={**saves, "async_save": True})
    assert made["GarbageCollection"][0] == (0, 0)
    assert made["Saves"][1] == {"background": True}
    logging = {"timing_log_level": 1, "log_interval": 20, "tensorboard_log_interval": 3}
    assert _standard(monkeypatch, logging=logging)["Timing"][0] == ("timers", 20), "with each log line"


def test_a_rank_reads_its_share_of_the_data_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(standard, "blocks_of_run", lambda config: (["blocks"], "not known"))
    monkeypatch.setattr(standard, "share", lambda blocks: ("a share of", *blocks))
    monkeypatch.setattr(standard, "DataCheck", checked.append)
    _standard(monkeypatch, data={"verify_data": "background", "mock_data": False})
    assert checked == [("a share of", "blocks")]
    _standard(monkeypatch, data={"verify_data": "background", "mock_data": True})
    _standard(monkeypatch, data={"verify_data": "off", "mock_data": False})
    assert len(checked) == 1


def test_files_of_a_run_go_on_behind_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the number that its points are counted by."""
    made: dict[str, Any] = {}
    for name in ("MetricsFile", "TensorBoardWriter"):
        writer = SimpleNamespace(write_arguments=lambda arguments: None)
        monkeypatch.setattr(standard, name, lambda *given, name=name, one=writer: made.update({name: given}) or one)
    config = small_config()
    logging = dataclasses.replace(config.logging, metrics_file="rows.jsonl", tensorboard_dir="events")
    state = TrainState(iteration=7, consumed_samples=56, scheduled_samples=48)
    run: Any = SimpleNamespace(config=dataclasses.replace(config, logging=logging), state=state, is_last_rank=True)
    standard._step_sinks(run)
    standard._log_sinks(run)
    assert made == {"TensorBoardWriter": ("events", 7, 56), "MetricsFile": ("rows.jsonl", 7)}
    run.is_last_rank = False
    assert standard._step_sinks(run) == standard._log_sinks(run) == []


def test_ranks_that_were_slow_are_told_of_until_the_interval_ends() -> None:
    """The last rank was slow in the first of two steps, and is well again in the second."""
    slow = iter(({1}, set(), set()))
    ranks: Any = SimpleNamespace(slow=set(), slowest=SimpleNamespace(rank=0, ratio=1.0))

    def add(*seconds: Any) -> tuple[list[Any], list[Any]]:
        ranks.slow = next(slow)
        return [], []

    ranks.add = add
    run: Any = SimpleNamespace(world_size=2, is_last_rank=False, device=NOTHING)
    callback = Stragglers(NOTHING, run)
    callback._ranks = ranks
    exchange: Any = SimpleNamespace(times=lambda device: torch.zeros(2 * 2 * 3))
    callback._under_way.append(exchange)
    callback._read(2)
    assert callback.summary() == {"rank": 0, "ratio": 1.0, "slow": [1]}
    callback.forget()
    assert callback.summary() == {"rank": 0, "ratio": 1.0, "slow": []}


def _of_interval(kind: type[Callback], **fields: Any) -> Callback:
    """A callback without the model that it would work on."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


LOOK_AT_WEIGHTS: dict[str, tuple[Callback, list[int]]] = {
    "saves": (Checkpointing("folder", 4, background=False), [4, 8]),
    "no saves but the last": (Checkpointing("folder", None, background=False), []),
    "snapshots": (Snapshots(NOTHING, 2, 4), [2, 6]),
    "evaluations": (Evaluation(NOTHING, NOTHING, 3, None, at_start=False, first=4), [6]),
    "no evaluations": (Evaluation(NOTHING, NOTHING, 0, None, at_start=False), []),
    "tasks": (_of_interval(Tasks, interval=3), [3, 6]),
    "samples": (_of_interval(Samples, interval=5), [5]),
    "a stop": (Stopping(NOTHING, 5, None), [5]),
    "reports": (Reporting([], 5, [], 4), []),
    "a profile": (Profiling(NOTHING), []),
    "a profile with ranges": (Profiling(NOTHING, lambda name: nullcontext()), list(range(1, 9))),
    "a clock": (Communication(NOTHING), list(range(1, 9))),
}


@pytest.mark.parametrize(("start", "steps", "evaluated"), [(7, 0, []), (5, 2, [6, 7]), (4, 2, [6])])
def test_a_finished_run_has_the_results_of_its_tasks(
    start: int, steps: int, evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, trainer, seen = _of_interval(Tasks, interval=3), _trainer(start), []

    def evaluate(trainer: Any) -> None:
        callback._evaluated_at = trainer.run.state.iteration  # pyright: ignore[reportAttributeAccessIssue]
        seen.append(trainer.run.state.iteration)

    monkeypatch.setattr(callback, "_evaluate", evaluate)
    callback.on_start(trainer)
    for trainer.run.state.iteration in range(start + 1, start + steps + 1):
        callback.on_step_end(trainer, NOTHING)
    trainer.finished = True
    callback.on_end(trainer)
    assert seen == evaluated


@pytest.mark.parametrize("name", LOOK_AT_WEIGHTS)
def test_a_step_that_a_callback_works_on_ends_before_the_next(name: str) -> None:
    """On a GPU the others may hear of it when the next has begun."""
    callback, expected = LOOK_AT_WEIGHTS[name]
    trainer = _trainer(0)
    trainer.run.config.logging = SimpleNamespace(log_params_norm=False)
    for iteration in range(1, 9):
        trainer.run.state.iteration = iteration
        assert callback.ends_before_next(trainer) == (iteration in expected), iteration


def test_the_norm_of_the_weights_is_that_of_its_step() -> None:
    trainer, report = _trainer(0), Reporting([], 5, [], 4)
    trainer.run.config.logging = SimpleNamespace(log_params_norm=True)
    found = []
    for trainer.run.state.iteration in range(1, 9):
        found += [trainer.run.state.iteration] if report.ends_before_next(trainer) else []
    assert found == [1, 4, 5, 8]


def test_the_seconds_of_steps_that_overlap_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step begins after a pause of 100 seconds in which something else was done."""
    now = [0.0]
    monkeypatch.setattr(reporting, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer, report = _trainer(0), Reporting([], 1000, [], 1000)
    trainer.run.config.model = SimpleNamespace(seq_length=4)
    heard = [("begin", 1.0), ("begin", 2.0), ("end", 1.0), ("end", 3.0), ("pause", 100.0), ("begin", 1.0), ("end", 5.0)]
    trainer.run.state.iteration = 2
    for event, seconds in heard:
        if event == "begin":
            report.on_step_begin(trainer)
        now[0] += seconds
        if event == "end":
            report.on_step_end(trainer, SimpleNamespace(global_batch_size=1))  # pyright: ignore[reportArgumentType]
    assert report._interval_seconds == 13.0
    assert report._interval_steps == 3
