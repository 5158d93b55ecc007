"""What each small callback does when it hears of a step, of a failure and of the end: on which ranks, and at which."""

import dataclasses
import gc
import math
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.save import Kept
from megatron_ext.errors import ConfigurationError, NumericError, StorageError
from megatron_ext.inference.sampling import Sampling
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.telemetry.communication import ComputeTime
from megatron_ext.telemetry.metrics import (
    Sample,
    SampleMetrics,
    SourceLoss,
    StepMetrics,
    TaskMetrics,
    ValidationMetrics,
)
from megatron_ext.telemetry.metrics import (
    TestMetrics as MetricsOfTest,
)
from megatron_ext.telemetry.stragglers import Slowness
from megatron_ext.train.callbacks import (
    checkpointing,
    communication,
    evaluation,
    memory_history,
    reporting,
    stopping,
    stragglers,
    tasks,
)
from megatron_ext.train.callbacks.checkpointing import Checkpointing
from megatron_ext.train.callbacks.communication import Communication, shares_of_all_ranks
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.garbage import GarbageCollection
from megatron_ext.train.callbacks.memory_history import MemoryHistory
from megatron_ext.train.callbacks.profiling import Profiling
from megatron_ext.train.callbacks.replicas import ReplicaCheck
from megatron_ext.train.callbacks.reporting import Reporting
from megatron_ext.train.callbacks.status import Status
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.train.callbacks.stragglers import Stragglers
from megatron_ext.train.callbacks.tasks import Samples, Tasks
from megatron_ext.train.run import HeldOut, HeldOutPart
from megatron_ext.train.shared_numbers import StopVotes
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import AuxiliaryLosses, StepResult
from tests.support.small_models import small_config

NOTHING: Any = None


def _trainer(iteration: int = 0, **run: Any) -> Any:
    state = TrainState(iteration=iteration, consumed_samples=8 * iteration)
    here = SimpleNamespace(torch_device=torch.device("cpu"))
    made = {"state": state, "rank": 0, "world_size": 1, "is_last_rank": True, "device": here, "config": small_config()}
    heard: list[Any] = []
    return SimpleNamespace(
        run=SimpleNamespace(**{**made, **run}), finished=False, heard=heard, report_evaluation=heard.append
    )


# Who asks to stop on this rank, on another one, and what follows: for good (a restart of the launch does not go on), or
# until torchrun starts the ranks again.
STOPS = [
    (None, None, False, None, None),
    ("SIGTERM", None, False, "SIGTERM", True),
    ("SIGTERM", None, True, "SIGTERM", False),
    ("SIGTERM", "SIGTERM", True, "SIGTERM", False),
    (None, "SIGTERM", True, "another rank was asked to stop", False),
    (None, "SIGTERM", False, "another rank was asked to stop", True),
    ("SIGINT", None, True, "SIGINT", True),
    (None, "the file stop", True, "another rank was asked to stop", True),
    ("SIGTERM", "the file stop", True, "SIGTERM", True),
    ("the file stop", "SIGTERM", True, "the file stop", True),
]


def _stopping(
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    other: str | None,
    *,
    late: bool,
    elastic: bool = False,
    overdue: tuple[bool, bool] = (False, False),
    interval: int | None = None,
    iteration: int = 7,
    ranks: int = 2,
) -> tuple[list[tuple[str, bool]], list[str], Any]:
    """The stops that rank 0 of two is told, what the launch remembers, and the signals."""
    remembered: list[str] = []
    monkeypatch.setattr(stopping.launch, "remember_request", remembered.append)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    def of(reason: str | None, is_overdue: bool) -> Stopping:
        signals: Any = SimpleNamespace(requested=reason is not None, reason=reason, for_good=None)
        callback = Stopping(signals, interval, None, elastic=elastic)
        callback.deadline = 1000.0 if is_overdue else 1000.5
        return callback

    callbacks = [of(reason, is_overdue) for reason, is_overdue in zip((own, other), overdue, strict=True)][:ranks]
    trainer = _trainer(iteration, world_size=ranks)
    stops: list[tuple[str, bool]] = []
    trainer.stop = lambda reason, by_signal=False: stops.append((reason, by_signal))
    votes = [one.votes() for one in callbacks]
    trainer.stop_votes = StopVotes(*(sum(map(int, vote)) for vote in zip(*votes, strict=True))) if late else None

    def all_reduce(seen: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        others = torch.tensor([[callbacks[1]._asked(), callbacks[1]._is_overdue()]], dtype=seen.dtype)
        together = torch.cat([seen[None], others])
        seen.copy_(together.amax(0) if op == torch.distributed.ReduceOp.MAX else together.sum(0))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce if ranks > 1 else None)
    callbacks[0].on_step_end(trainer, NOTHING)
    return stops, remembered, callbacks[0].signals


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("own", "other", "elastic", "reason", "for_good"), STOPS)
def test_all_ranks_stop_by_what_one_was_asked(
    own: str | None,
    other: str | None,
    elastic: bool,
    reason: str | None,
    for_good: bool | None,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the numbers are read at once or a step later; two that SIGTERM asks are no other signal."""
    stops, remembered, signals = _stopping(monkeypatch, own, other, late=late, elastic=elastic)
    assert stops == ([] if reason is None else [(reason, True)])
    assert signals.for_good is for_good
    assert remembered == ([reason] if for_good else [])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("asked", "overdue", "interval", "iteration", "stops"),
    [
        (None, (True, False), None, 7, [("--exit-duration-in-mins is over", False)]),
        (None, (False, True), None, 7, [("--exit-duration-in-mins is over", False)]),
        (None, (False, False), 7, 7, [("--exit-interval 7", False)]),
        (None, (False, False), 7, 14, [("--exit-interval 7", False)]),
        (None, (False, False), 7, 8, []),
        (None, (False, False), 0, 7, []),
        (None, (True, True), 7, 7, [("--exit-duration-in-mins is over", False)]),
        ("SIGTERM", (True, True), 7, 7, [("SIGTERM", True)]),
    ],
)
def test_other_stops_are_by_no_signal(
    asked: str | None,
    overdue: tuple[bool, bool],
    interval: int | None,
    iteration: int,
    stops: list[tuple[str, bool]],
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _, _ = _stopping(
        monkeypatch, asked, None, late=late, overdue=overdue, interval=interval, iteration=iteration
    )
    assert found == stops


def test_a_rank_that_is_alone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _stopping(monkeypatch, "SIGHUP", None, late=False, ranks=1)[0] == [("SIGHUP", True)]
    assert _stopping(monkeypatch, None, None, late=False, ranks=1)[0] == []


@pytest.mark.parametrize(
    ("reason", "overdue", "votes"),
    [
        (None, False, (0, 0, 0)),
        (None, True, (0, 0, 1)),
        ("SIGTERM", False, (1, 0, 0)),
        ("SIGINT", False, (0, 1, 0)),
        ("the file stop", True, (0, 1, 1)),
    ],
)
def test_a_rank_votes_for_one_kind_of_stop(reason: str | None, overdue: bool, votes: tuple[int, int, int]) -> None:
    signals: Any = SimpleNamespace(requested=reason is not None, reason=reason)
    callback = Stopping(signals, None, None)
    callback.deadline = time.monotonic() - 1.0 if overdue else None
    assert callback.votes() == StopVotes(*votes)


@pytest.mark.parametrize(("begun", "done", "told"), [(None, 4, 5), (5, 4, 5), (6, 4, 5), (5, 5, 5)])
def test_a_failure_is_that_of_the_step_that_was_not_done(begun: int | None, done: int, told: int) -> None:
    """Where numbers are read late, the step after it was begun; an end of a step fails with that step."""
    status, trainer = RunStatus(0), _trainer(done)
    status.iteration = begun
    Status(status).on_failure(trainer, KeyboardInterrupt())
    assert status.iteration == told


def test_the_step_that_is_begun_is_on_record() -> None:
    status, trainer = RunStatus(0), _trainer(4)
    Status(status).on_step_begin(trainer)
    assert status.iteration == 5


def test_the_clock_runs_around_steps_until_the_end_or_a_failure() -> None:
    heard: list[str] = []
    names = ("start", "stop", "begin_step", "end_step")
    clock: Any = SimpleNamespace(**{name: lambda name=name: heard.append(name) for name in names})
    for end in ("on_end", "on_failure"):
        callback, trainer = Communication(clock), _trainer()
        callback.on_start(trainer)
        callback.on_step_begin(trainer)
        callback.on_step_end(trainer, NOTHING)
        getattr(callback, end)(trainer, *([KeyboardInterrupt()] if end == "on_failure" else []))
    assert heard == ["start", "begin_step", "end_step", "stop"] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_are_those_of_the_ranks_together(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(seconds: torch.Tensor) -> None:
        assert ranks > 1
        seconds += torch.tensor([float(ranks), 0.0])

    monkeypatch.setattr(torch.distributed, "all_reduce", add)
    monkeypatch.setattr(communication, "shares", lambda seconds: {"of": seconds.tolist()})
    clock: Any = SimpleNamespace(take=lambda: torch.tensor([1.0, 2.0]))
    found = shares_of_all_ranks(clock, _trainer(world_size=ranks).run)
    assert found == {"of": [1.0 + (ranks if ranks > 1 else 0), 2.0]}


def test_the_profiler_hears_of_every_step_and_each_is_a_range() -> None:
    heard: list[Any] = []

    class Range:
        def __init__(self, name: str):
            self.name = name

        def __enter__(self) -> None:
            heard.append(f"begin {self.name}")

        def __exit__(self, *_: object) -> None:
            heard.append(f"end {self.name}")

    profiler: Any = SimpleNamespace(before_step=heard.append, finish=lambda: heard.append("finish"))
    for ranges in (None, Range):
        callback, trainer = Profiling(profiler, ranges), _trainer(4)
        for trainer.run.state.iteration in (4, 5):
            callback.on_step_begin(trainer)
            callback.on_step_end(trainer, NOTHING)
        callback.on_step_end(trainer, NOTHING)
        callback.on_end(trainer)
    steps = [5, "begin step 5", "end step 5", 6, "begin step 6", "end step 6"]
    assert heard == [5, 6, "finish", *steps, "finish"], "no range is ended twice"


def _written(monkeypatch: pytest.MonkeyPatch, path: Path, fails: bool = False) -> tuple[Any, list[str]]:
    """A trainer whose device writes the history of its memory, and the files that it was given."""
    files: list[str] = []

    def write(file: str) -> None:
        files.append(file)
        if fails:
            raise OSError(28, "No space left on device")

    return _trainer(device=SimpleNamespace(write_memory_history=write)), files


@pytest.mark.parametrize("rank", [0, 3])
def test_the_history_of_memory_is_written_with_each_log_line_and_at_the_end(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank into its own file, whose folder is made."""
    trainer, files = _written(monkeypatch, tmp_path)
    callback = MemoryHistory(str(tmp_path / "new" / "folder" / "memory.pickle"), rank, 3)
    own = str(tmp_path / "new" / "folder" / f"memory_{rank}.pickle")
    written = []
    for iteration in range(1, 8):
        trainer.run.state.iteration = iteration
        callback.on_step_end(trainer, NOTHING)
        written += [iteration] * len(files)
        assert set(files) <= {own}
        files.clear()
    assert written == [1, 3, 6]
    assert (tmp_path / "new" / "folder").is_dir()
    callback.on_end(trainer)
    callback.on_failure(trainer, MemoryError())
    assert files == [own, own]
    assert not callback.ends_before_next(trainer)


def test_a_history_that_cannot_be_written_hides_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer, files = _written(monkeypatch, tmp_path, fails=True)
    callback = MemoryHistory(str(tmp_path / "memory.pickle"), 2, 1)
    said = rf"^cannot write --memory-snapshot-path {tmp_path}/memory_2\.pickle: No space left on device\. .*"
    with pytest.raises(StorageError, match=said):
        callback.on_end(trainer)
    callback.on_failure(trainer, MemoryError())
    assert len(files) == 2


@pytest.mark.parametrize(
    ("records", "ranks", "rank", "expected"),
    [
        (True, None, 5, True),
        (True, (), 5, True),
        (True, (0, 5), 5, True),
        (True, (0, 5), 1, False),
        (False, (5,), 5, False),
        (False, None, 5, False),
    ],
)
def test_whose_memory_is_recorded(records: bool, ranks: tuple[int, ...] | None, rank: int, expected: bool) -> None:
    config = small_config()
    flags = dataclasses.replace(config.profiling, record_memory_history=records, profile_ranks=ranks)
    begun: list[bool] = []
    device: Any = SimpleNamespace(record_memory_history=lambda: begun.append(True))
    memory_history.begin(dataclasses.replace(config, profiling=flags), rank, device)
    assert begun == [True] * expected


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "reason"),
    [(NumericError("NaN"), ": cannot write"), (StorageError("full"), ""), (KeyboardInterrupt(), "")],
)
def test_why_a_background_save_is_no_checkpoint(
    error: BaseException,
    reason: str,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is finished only after an error of all ranks, and that may fail as well: with its own reason."""

    class Failing:
        def __init__(self, run: Any, folder: str, *, background: bool, kept: Kept):
            self.run, self.iteration = run, run.state.iteration

        def finish(self) -> Path:
            raise StorageError("cannot write")

    monkeypatch.setattr(checkpointing, "Save", Failing)
    callback, trainer = Checkpointing("folder", 2, background=True), _trainer(2, rank=rank)
    callback.on_step_end(trainer, NOTHING)
    callback.on_failure(trainer, error)
    warning = f"warning: the background save of iteration 2 was not finished and is no checkpoint{reason}\n"
    assert capsys.readouterr().err == (warning if rank == 0 else "")


def test_replicas_are_not_compared_where_no_interval_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for off in (None, 0):
        assert ReplicaCheck(off, off)._checks == []
        assert [interval for interval, _ in ReplicaCheck(off, 3)._checks] == [3]


def test_garbage_that_was_there_is_collected_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen first would be kept, garbage and all."""
    done: list[str] = []
    for name in ("disable", "collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: done.append(name))
    GarbageCollection(0, 0).on_start(NOTHING)
    assert done == ["disable", "collect", "freeze"]
    assert not GarbageCollection(1, 1).ends_before_next(NOTHING)


def _evaluated_data(names: Iterable[tuple[str, str]]) -> HeldOut:
    return HeldOut(NOTHING, tuple(HeldOutPart(name, suffix, range(4)) for name, suffix in names))


@pytest.mark.parametrize("sources", [1, 2])
def test_an_evaluation_tells_the_loss_of_each_of_several_sources(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = (2.5, 3.5)[:sources]
    monkeypatch.setattr(evaluation, "evaluate_sources", lambda run, data: SimpleNamespace(all=3.0, parts=losses))
    monkeypatch.setattr(evaluation, "evaluate", lambda run, data: 4.0)
    valid = _evaluated_data([("a.bin", "0"), ("b.bin", "books")][:sources])
    callback, trainer = Evaluation(valid, valid, 3, None, at_start=False), _trainer(6)
    callback.on_step_end(trainer, NOTHING)
    parts = (SourceLoss(name="a.bin", suffix="0", loss=2.5), SourceLoss(name="b.bin", suffix="books", loss=3.5))
    expected: list[Any] = [
        ValidationMetrics(iteration=6, consumed_samples=48, validation_loss=3.0, sources=parts if sources > 1 else ())
    ]
    assert trainer.heard == expected
    trainer.finished = True
    callback.on_end(trainer)
    expected.append(MetricsOfTest(iteration=6, consumed_samples=48, test_loss=4.0))
    assert trainer.heard == expected, "the validation of the last step was there already"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("rows", "known"),
    [
        ([{"iteration": 6, "validation_loss": 1.0}, {"iteration": 3, "test_loss": 1.0}], ["validation_loss"]),
        ([{"iteration": 3, "validation_loss": 1.0}, {"iteration": 9, "validation_loss": 1.0}], []),
        ([{"iteration": 6, "test_loss": 1.0}, {"iteration": 6, "lm_loss": 1.0}], ["test_loss"]),
    ],
)
def test_a_finished_run_asks_the_rank_that_writes_what_is_known(
    rows: list[dict[str, float]], known: list[str], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of three ranks has the file; the others take what it says."""

    def broadcast(values: list[set[str]], src: int) -> None:
        assert src == 2
        if last:
            assert values[0] & {"validation_loss", "test_loss"} == set(known)
        else:
            assert values == [set()]
            values[0] = set(known)

    monkeypatch.setattr(evaluation, "read_rows", lambda path: rows)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    trainer = _trainer(6, world_size=3, is_last_rank=last, rank=2 if last else 0)
    trainer.finished = True
    callback = Evaluation(NOTHING, NOTHING, 3, "metrics.jsonl", at_start=False)
    callback.on_start(trainer)
    assert callback.evaluated_at == (6 if "validation_loss" in known else None)
    assert callback.tested_at == (6 if "test_loss" in known else None)


def test_tasks_are_evaluated_with_the_batch_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch of a replica. They are prepared once, and told of under their names."""
    asked: list[Any] = []
    monkeypatch.setattr(tasks, "prepare_task", lambda model, task: asked.append((model, task.name)) or task.name)
    monkeypatch.setattr(
        tasks, "evaluate_prepared", lambda model, task, rows: asked.append((model, task, rows)) or {task: 1.0}
    )
    model: Any = "model"
    given: Any = [SimpleNamespace(name="one"), SimpleNamespace(name="two")]
    callback = Tasks(model, given, 3)
    training = {"eval_global_batch_size": 12, "eval_micro_batch_size": 3, "micro_batch_size": 2}
    trainer = _trainer(3, config=small_config(training=training))
    callback.on_step_end(trainer, NOTHING)
    assert asked == [(model, "one"), (model, "two"), (model, "one", 3), (model, "two", 3)]
    told = TaskMetrics(iteration=3, consumed_samples=24, tasks={"one": {"one": 1.0}, "two": {"two": 1.0}})
    assert trainer.heard == [told]
    trainer.finished = True
    callback.on_end(trainer)
    assert len(trainer.heard) == 1, "not twice for one step"
    trainer.run.state.iteration, trainer.finished = 4, False
    callback.on_end(trainer)
    assert len(trainer.heard) == 1, "a run that was stopped goes on later"
    trainer.finished = True
    callback.on_end(trainer)
    assert [one.iteration for one in trainer.heard] == [3, 4]


def test_samples_go_on_from_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the likeliest tokens; an empty prompt is a new document, and no text an empty one."""
    asked: list[Any] = []
    monkeypatch.setattr(tasks, "check_prompts", lambda model, ids, sampling: asked.append((ids, sampling)))

    def generate(model: Any, ids: Any, sampling: Any, *, rows: int) -> list[Any]:
        asked.append((ids, sampling, rows))
        return [SimpleNamespace(text="made"), SimpleNamespace(text=None)]

    monkeypatch.setattr(tasks, "generate", generate)
    tokenizer = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text], eod=7)
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    callback = Samples(model, ["ab", ""], 3, 5)
    training = {"eval_global_batch_size": 12, "eval_micro_batch_size": 3, "micro_batch_size": 2}
    trainer = _trainer(config=small_config(training=training))
    for trainer.run.state.iteration in range(1, 6):
        trainer.run.state.consumed_samples = 8 * trainer.run.state.iteration
        callback.on_step_end(trainer, NOTHING)
    ids, sampling = [[97, 98], [7]], Sampling(max_new_tokens=5)
    assert asked == [(ids, sampling), (ids, sampling, 3)], "at the third of five steps"
    made = (Sample(prompt="ab", text="made"), Sample(prompt="", text=""))
    assert trainer.heard == [SampleMetrics(iteration=3, consumed_samples=24, samples=made)]
    with pytest.raises(ConfigurationError, match=r"^--sample-prompts has no prompt"):
        Samples(model, [], 3, 5)


class _Sink:
    def __init__(self) -> None:
        self.got: list[Any] = []
        self.closed = 0

    def write(self, metrics: Any) -> None:
        self.got.append(metrics)

    def close(self) -> None:
        self.closed += 1


def _reported(
    monkeypatch: pytest.MonkeyPatch, *, start: TrainState, steps: int, last: bool = True, **training: Any
) -> tuple[_Sink, _Sink, list[str], Any]:
    """What the sinks of steps (every second one) and of the log (every third) get of steps of one second each."""
    now = [0.0]
    monkeypatch.setattr(reporting, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(reporting, "flops_per_token", lambda config: 3.0e9)
    monkeypatch.setattr(reporting, "model_flops_utilization", lambda tflops, name: (tflops, name))
    monkeypatch.setattr(reporting, "use_of_sources", lambda samples, consumed, length: {samples: (consumed, length)})
    monkeypatch.setattr(reporting, "parameters_norm", lambda run: 100.0 + run.state.iteration)
    monkeypatch.setattr(reporting, "shares_of_all_ranks", lambda clock, run: {clock: float(run.state.iteration)})
    heard: list[str] = []
    slow: Any = SimpleNamespace(summary=lambda: {"rank": 3}, forget=lambda: heard.append("forget"))
    config = small_config(training={"train_iters": 70, **training})
    logging = dataclasses.replace(config.logging, log_params_norm=True)
    memory = SimpleNamespace(max_allocated=13, allocated=11, reserved=12)
    trainer = _trainer(
        state=start,
        config=dataclasses.replace(config, logging=logging),
        world_size=4,
        is_last_rank=last,
        device=SimpleNamespace(memory=lambda: memory, model_name="a device"),
        loaders=SimpleNamespace(samples="samples"),
    )
    trainer.learning_rate = 0.25
    trainer.weight_decay_curve = reporting_curve()
    by_step, by_log = _Sink(), _Sink()
    clock: Any = "clock"
    callback = Reporting([by_step], 2, [by_log], 3, clock, slow)
    for _ in range(steps):
        now[0] += 10.0  # between two steps, which counts for none
        callback.on_step_begin(trainer)
        now[0] += 1.0
        state = trainer.run.state
        state.iteration += 1
        state.consumed_samples += 6
        state.consumed_tokens += 90
        updated = state.iteration != 5
        result = StepResult(
            float(state.iteration),
            90,
            6,
            updated,
            0.5 if updated else None,
            8.0,
            0.0 if updated else None,
            AuxiliaryLosses(load_balancing=0.125, z=0.0625),
        )
        if updated:
            state.interval_loss += result.loss
            state.interval_losses += 1
            state.scheduled_samples += 6
        else:
            state.interval_skipped += 1
        heard.append(str(state.iteration))
        callback.on_step_end(trainer, result)
    return by_step, by_log, heard, (callback, trainer)


def reporting_curve() -> Any:
    """Return a weight decay that is a thousandth for each sample of an update."""
    from megatron_ext.optim.curves import WeightDecayCurve

    return WeightDecayCurve(0.0, 1.0, 1000, "linear")


def test_every_number_of_a_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of the steps since the last line, of which the fifth was skipped; TensorBoard has each step's own."""
    start = TrainState(iteration=3, consumed_samples=18, consumed_tokens=270, scheduled_samples=12)
    by_step, by_log, heard, _ = _reported(monkeypatch, start=start, steps=3)
    assert [one.iteration for one in by_step.got] == [4, 6]
    [logged] = by_log.got
    tokens = 6 * 16  # samples of a step, each of 16 tokens, in a second
    tflops = 3.0e9 * tokens / 4 / 1e12
    expected = StepMetrics(
        iteration=6,
        train_iters=70,
        consumed_samples=36,
        consumed_tokens=540,
        lm_loss=5.0,
        grad_norm=0.5,
        learning_rate=0.25,
        weight_decay=0.024,
        global_batch_size=6,
        loss_scale=8.0,
        skipped_iterations=1,
        nan_iterations=0,
        elapsed_ms=1000.0,
        tokens_per_second=float(tokens),
        tflops_per_gpu=logged.tflops_per_gpu,
        mfu=(logged.tflops_per_gpu, "a device"),  # pyright: ignore[reportArgumentType]
        peak_memory_bytes=13,
        allocated_bytes=11,
        reserved_bytes=12,
        num_zeros=0,
        params_norm=106.0,
        load_balancing_loss=0.125,
        z_loss=0.0625,
        world_size=4,
        consumed_by_source={"samples": (36, 16)},  # pyright: ignore[reportArgumentType]
        time_shares={"clock": 6.0},
        slowest_rank={"rank": 3},
    )
    assert logged == expected
    assert logged.tflops_per_gpu == pytest.approx(tflops)
    assert by_step.got[1] == dataclasses.replace(expected, lm_loss=6.0)
    assert heard == ["4", "5", "6", "forget"]


def test_a_line_begins_anew_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has one of its own; each number after a line is of the steps since."""
    by_step, by_log, heard, (callback, trainer) = _reported(monkeypatch, start=TrainState(), steps=6)
    assert [(one.iteration, one.lm_loss) for one in by_log.got] == [(1, 1.0), (3, 2.5), (6, 5.0)]
    assert [one.skipped_iterations for one in by_log.got] == [0, 0, 1]
    assert [(one.iteration, one.lm_loss) for one in by_step.got] == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert {(one.elapsed_ms, one.tokens_per_second) for one in (*by_log.got, *by_step.got)} == {(1000.0, 96.0)}
    assert heard.count("forget") == 3
    told = MetricsOfTest(iteration=6, consumed_samples=36, test_loss=4.0)
    callback.on_evaluation(trainer, told)
    callback.on_end(trainer)
    assert (by_step.got[-1], by_log.got[-1], by_step.closed, by_log.closed) == (told, told, 1, 1)


def test_the_loss_of_an_interval_goes_on_where_the_checkpoint_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The means of two steps before it are in the state; an interval without any update has the last step's loss."""
    start = TrainState(iteration=5, interval_loss=30.0, interval_losses=2)
    _, by_log, _, _ = _reported(monkeypatch, start=start, steps=1)
    [logged] = by_log.got
    assert (logged.lm_loss, logged.elapsed_ms) == ((30.0 + 6.0) / 3, 1000.0)


def test_other_ranks_take_part_and_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    by_step, by_log, heard, (_, trainer) = _reported(monkeypatch, start=TrainState(), steps=6, last=False)
    assert (by_step.got, by_log.got) == ([], [])
    assert heard.count("forget") == 3
    assert trainer.run.state.interval_losses == 0, "the state is equal on every rank"


def test_the_planned_steps_are_told_of_a_length_in_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"train_iters": None, "train_samples": 22, "global_batch_size": 4}
    _, by_log, _, _ = _reported(monkeypatch, start=TrainState(), steps=1, **training)
    assert by_log.got[0].train_iters == 5


def _slow(ranks: int, last: bool = True) -> tuple[Any, list[tuple[Any, ...]]]:
    """The callback of a run of some ranks, and what is compared of each step."""
    run: Any = SimpleNamespace(
        world_size=ranks, is_last_rank=last, device=SimpleNamespace(torch_device=torch.device("cpu"))
    )
    compared: list[tuple[Any, ...]] = []
    callback: Any = Stragglers(NOTHING, run)
    callback._ranks = SimpleNamespace(
        slow=set(), slowest=None, add=lambda *given: (compared.append(given), ([], []))[1]
    )
    return callback, compared


def test_times_of_an_exchange_are_those_of_each_step_of_each_rank() -> None:
    """Three ranks send three times of two steps: number, step and rank are digits of each."""
    callback, compared = _slow(3)
    sent = torch.tensor(
        [[[100.0 * kind + 10 * step + rank for kind in (1, 2, 3)] for step in (0, 1)] for rank in range(3)]
    )
    callback._under_way.append(SimpleNamespace(times=lambda device: sent.flatten()))
    callback._read(2)
    assert compared == [
        ([200.0, 201.0, 202.0], [100.0, 101.0, 102.0], [300.0, 301.0, 302.0]),
        ([210.0, 211.0, 212.0], [110.0, 111.0, 112.0], [310.0, 311.0, 312.0]),
    ]


def test_an_exchange_that_is_not_there_yet_is_read_later() -> None:
    callback, compared = _slow(2)
    found: list[torch.Tensor | None] = [None, torch.zeros(12), torch.zeros(12)]
    callback._under_way.extend([SimpleNamespace(times=lambda device: found.pop(0))] * 2)
    callback.on_step_end(_trainer(1), NOTHING)
    assert compared == []
    callback.on_end(_trainer(1))
    assert len(compared) == 4


def test_what_is_sent_are_the_two_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step; the first three, and those whose time is not known, are no numbers."""
    sent: list[list[float]] = []

    def gather(times: torch.Tensor, own: torch.Tensor, async_op: bool) -> Any:
        assert (async_op, times.shape) == (True, (12,))
        sent.append(own.tolist())
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    callback, _ = _slow(2)
    callback._read = lambda iteration: None
    known = iter(([1], [2, 3], [4], [5, 6, 7, 8], [9]))
    callback._clock = SimpleNamespace(
        take_compute=lambda: [ComputeTime(float(step), step + 0.25, step + 0.5) for step in next(known)]
    )
    for iteration in range(1, 11):
        callback.on_step_end(_trainer(iteration), NOTHING)

    def times(*steps: int | None) -> list[float]:
        return [math.nan if step is None else step + part for step in steps for part in (0.0, 0.25, 0.5)]

    expected = [times(None, None), times(None, None), times(4, None), times(6, 7), times(8, 9)]
    assert [str(one) for one in sent] == [str(one) for one in expected]


@pytest.mark.parametrize("last", [False, True])
def test_one_rank_says_who_became_slow_and_who_no_longer_is(last: bool, capsys: pytest.CaptureFixture[str]) -> None:
    callback, _ = _slow(2, last)
    own = Slowness(1, 1.5, 0.003, 0.002, (0,))
    shared = Slowness(0, 1.25, 0.005, 0.004, (1,), 0.5, 0.75)
    slow_core = Slowness(0, 1.25, 0.005, 0.004, (1, 2), 0.75, 0.5)
    callback._ranks.add = lambda *_: ([own, shared, slow_core], [own, shared])
    callback._hosts = ["a", "b"]
    callback._under_way.append(SimpleNamespace(times=lambda device: torch.zeros(12)))
    callback._read(7)
    said = capsys.readouterr().out.splitlines()
    times = "1.25 times as long as its peers: 5.0 ms of a step,"
    once = [
        "straggler at iteration 7: rank 1 (b) computes 1.50 times as long as its peers: 3.0 ms of a step, "
        "rank 0 2.0 ms",
        f"straggler at iteration 7: rank 0 (a) shares its core, which it had 50% of the time, and computes {times} "
        "rank 1 4.0 ms",
        "straggler at iteration 7: rank 0 (a) has a slower core than its peers, 50% of their speed, and computes "
        f"{times} ranks 1-2 4.0 ms",
        "straggler at iteration 7: rank 1 (b) computes as long as its peers again",
        "straggler at iteration 7: rank 0 (a) computes as long as its peers again by the clock",
    ]
    assert said == (once * 2 if last else [])


def test_ranks_are_compared_within_their_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stages and machines that all tell once."""

    def gather(found: list[Any], own: Any) -> None:
        assert (own, len(found)) == (("here", 1), 4)
        found[:] = [("a", 0), ("b", 1), ("here", 1), ("c", 0)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(stragglers.socket, "gethostname", lambda: "here")
    made: list[list[int]] = []
    monkeypatch.setattr(stragglers, "SlowRanks", lambda stages: made.append(list(stages)))
    run: Any = SimpleNamespace(world_size=4, groups=SimpleNamespace(pp=SimpleNamespace(rank=lambda: 1)))
    callback = Stragglers(NOTHING, run)
    callback.on_start(NOTHING)
    assert made == [[], [0, 1, 1, 0]]
    assert callback._hosts == ["a", "b", "here", "c"]


def test_times_are_read_when_the_device_has_copied_them() -> None:
    """All have sent theirs before that; the copy is begun once."""
    heard: list[str] = []
    passed = iter((False, True))
    device: Any = SimpleNamespace(
        mark=lambda: heard.append("mark") or "mark", has_passed=lambda mark: heard.append(mark) or next(passed)
    )
    sent = torch.ones(3)
    exchange = stragglers._Exchange(SimpleNamespace(wait=lambda: heard.append("wait")), sent)
    assert exchange.times(device) is None
    found = exchange.times(device)
    assert found is not None
    assert found.tolist() == [1.0] * 3
    assert heard == ["wait", "mark", "mark", "mark"]
