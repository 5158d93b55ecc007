"""What each small callback that writes of a run, or tells of it, does when it hears of a step, of a failure and of the
end: on which ranks, and at which."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.save import Kept
from megatron_ext.errors import ConfigurationError, NumericError, StorageError
from megatron_ext.inference.sampling import Sampling
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
from megatron_ext.train.callbacks import checkpointing, evaluation, memory_history, reporting, tasks
from megatron_ext.train.callbacks.checkpointing import Checkpointing
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.memory_history import MemoryHistory
from megatron_ext.train.callbacks.reporting import Reporting
from megatron_ext.train.callbacks.tasks import Samples, Tasks
from megatron_ext.train.run import HeldOut, HeldOutPart
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import AuxiliaryLosses, StepResult
from tests.support.bare_trainer import NOTHING, bare_trainer
from tests.support.small_models import small_config


def _written(monkeypatch: pytest.MonkeyPatch, path: Path, fails: bool = False) -> tuple[Any, list[str]]:
    """A trainer whose device writes the history of its memory, and the files that it was given."""
    files: list[str] = []

    def write(file: str) -> None:
        files.append(file)
        if fails:
            raise OSError(28, "No space left on device")

    return bare_trainer(device=SimpleNamespace(write_memory_history=write)), files


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
    callback, trainer = Checkpointing("folder", 2, background=True), bare_trainer(2, rank=rank)
    callback.on_step_end(trainer, NOTHING)
    callback.on_failure(trainer, error)
    warning = f"warning: the background save of iteration 2 was not finished and is no checkpoint{reason}\n"
    assert capsys.readouterr().err == (warning if rank == 0 else "")


def _evaluated_data(names: Iterable[tuple[str, str]]) -> HeldOut:
    return HeldOut(NOTHING, tuple(HeldOutPart(name, suffix, range(4)) for name, suffix in names))


@pytest.mark.parametrize("sources", [1, 2])
def test_an_evaluation_tells_the_loss_of_each_of_several_sources(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = (2.5, 3.5)[:sources]
    monkeypatch.setattr(evaluation, "evaluate_sources", lambda run, data: SimpleNamespace(all=3.0, parts=losses))
    monkeypatch.setattr(evaluation, "evaluate", lambda run, data: 4.0)
    valid = _evaluated_data([("a.bin", "0"), ("b.bin", "books")][:sources])
    callback, trainer = Evaluation(valid, valid, 3, None, at_start=False), bare_trainer(6)
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
    trainer = bare_trainer(6, world_size=3, is_last_rank=last, rank=2 if last else 0)
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
    trainer = bare_trainer(3, config=small_config(training=training))
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
    trainer = bare_trainer(config=small_config(training=training))
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
    trainer = bare_trainer(
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
