"""Courses that a run can take, each from its beginning to its end: steps that are skipped, overflow or leave all out;
evaluations of several sources; what it begins with; and what a function that wires hands to the next."""

import dataclasses
import hashlib
import math
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.huggingface import load as huggingface
from megatron_ext.checkpoint.local import writer
from megatron_ext.checkpoint.native import load
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import CheckpointConfig, LoggingConfig, OptimizerConfig
from megatron_ext.telemetry.metrics import SourceLoss, ValidationMetrics
from megatron_ext.telemetry.metrics import TestMetrics as LossOfTest
from megatron_ext.train import build, configure, datasets, evaluate, pretrain
from megatron_ext.train import step as steps
from megatron_ext.train import trainer as loop
from megatron_ext.train.callbacks import evaluation, garbage
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.garbage import GarbageCollection
from megatron_ext.train.run import HeldOut, HeldOutPart
from megatron_ext.train.shared_numbers import Summed
from megatron_ext.train.state import Position, TrainState
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Trainer
from tests.support.small_models import small_config

NOTHING: Any = None
NAN = math.nan


@pytest.mark.parametrize("wants_the_end", [False, True])
def test_the_counters_after_every_kind_of_step(wants_the_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, tokens and whether the weights were updated; then the counters, each by each."""
    script = [
        ((1.0, 10, True), (1, 4, 10, 4, 1.0, 1, 0, 0)),
        ((2.0, 20, False), (2, 8, 30, 4, 1.0, 1, 1, 0)),
        ((NAN, 30, False), (3, 12, 60, 4, 1.0, 1, 2, 1)),
        ((4.0, 40, True), (4, 16, 100, 8, 5.0, 2, 2, 1)),
        ((0.0, 0, False), (5, 20, 100, 8, 5.0, 2, 3, 1)),
        ((NAN, 50, True), (6, 24, 150, 12, NAN, 3, 3, 2)),
        ((8.0, 60, True), (7, 28, 210, 16, NAN, 4, 3, 2)),
    ]
    config = small_config(training={"train_iters": len(script)})
    optimizer: Any = SimpleNamespace(param_groups=[])
    run: Any = SimpleNamespace(
        config=dataclasses.replace(config, optimizer=OptimizerConfig(lr=1.0)),
        state=TrainState(),
        optimizer=optimizer,
        progress=SimpleNamespace(phase=""),
        device=SimpleNamespace(reads_wait=False),
    )
    taken = iter(script)
    given: list[int] = []

    def train_step(run: Any, batch: int, *_: Any) -> StepResult:
        (loss, tokens, updated), _ = next(taken)
        given.append(batch)
        return StepResult(loss, tokens, batch, updated, None, 1.0, None)

    heard: list[tuple[Any, ...]] = []

    class Hears(loop.Callback):
        def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
            heard.append(tuple(vars(trainer.run.state).values()))

        def ends_before_next(self, trainer: Trainer) -> bool:
            return wants_the_end

    monkeypatch.setattr(loop, "train_step", train_step)
    Trainer(run, [Hears()]).fit()
    names = [field.name for field in dataclasses.fields(TrainState)]
    assert names == [
        "iteration",
        "consumed_samples",
        "consumed_tokens",
        "scheduled_samples",
        "interval_loss",
        "interval_losses",
        "interval_skipped",
        "interval_nan",
    ]
    assert [str(one) for one in heard] == [str(expected) for _, expected in script]
    assert given == [4] * len(script)
    run.state.start_interval()
    assert str(tuple(vars(run.state).values())) == str((7, 28, 210, 16, 0.0, 0, 0, 0))
    assert run.state.position == Position(7, 28, 16)
    run.state.position = Position(1, 2, 3)
    assert (run.state.iteration, run.state.consumed_samples, run.state.scheduled_samples) == (1, 2, 3)


STEPS: list[tuple[dict[str, Any], list[str], StepResult]] = [
    ({}, ["clip 0.75 by 2.5", "update"], StepResult(1.5, 12, 4, True, 2.5, 1.0, None)),
    ({"clip": 0.0}, ["update"], StepResult(1.5, 12, 4, True, 2.5, 1.0, None)),
    ({"zeros": True}, ["clip 0.75 by 2.5", "zeros", "update"], StepResult(1.5, 12, 4, True, 2.5, 1.0, 17.0)),
    ({"fp16": True}, ["clip 0.75 by 2.5", "update"], StepResult(1.5, 12, 4, True, 2.5, 512.0, None)),
    ({"loss_scale": 64.0}, ["clip 0.75 by 2.5", "update"], StepResult(1.5, 12, 4, True, 2.5, 512.0, None)),
    ({"overflow": True, "zeros": True}, [], StepResult(1.5, 12, 4, False, None, 1.0, None)),
    (
        {"experts": 4},
        ["clip 0.75 by 2.5", "update"],
        StepResult(1.5, 12, 4, True, 2.5, 1.0, None, "of 3 microbatches"),  # pyright: ignore[reportArgumentType]
    ),
    (
        {"experts": 4, "overflow": True},
        [],
        StepResult(1.5, 12, 4, False, None, 1.0, None, "of 3 microbatches"),  # pyright: ignore[reportArgumentType]
    ),
]


@pytest.mark.parametrize(("given", "done", "expected"), STEPS, ids=["-".join(one[0]) or "plain" for one in STEPS])
def test_what_a_step_does_in_which_order(
    given: dict[str, Any], done: list[str], expected: StepResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm is taken of an overflow, too: it is collective. Nothing is changed before the numbers are checked."""
    heard: list[Any] = []
    overflow = given.get("overflow", False)

    def note(what: Any, result: Any = None) -> Any:
        heard.append(what)
        return result

    def compute(run: Any, batch: int) -> Any:
        shared = SimpleNamespace(
            add_gradients=lambda *given: note(("add", *given)), summed=lambda: Summed(1.5, 12, 0, 0)
        )
        return note(
            f"gradients of {batch}",
            SimpleNamespace(samples=range(4), of_microbatches=torch.ones(3, 2), shared=shared, evidence="evidence"),
        )

    monkeypatch.setattr(steps, "compute_gradients", compute)
    monkeypatch.setattr(steps, "leaves_out", lambda run, batch: False)
    monkeypatch.setattr(steps, "_auxiliary_losses", lambda run, microbatches: f"of {microbatches} microbatches")
    monkeypatch.setattr(
        steps, "check_numbers", lambda run, summed, batch, evidence: note(("check", summed.loss, batch, evidence))
    )
    config = small_config(
        {"num_experts": given.get("experts")},
        training={"fp16": given.get("fp16", False), "loss_scale": given.get("loss_scale")},
    )
    config = dataclasses.replace(
        config,
        optimizer=OptimizerConfig(clip_grad=given.get("clip", 0.75)),
        logging=LoggingConfig(log_num_zeros_in_grad=given.get("zeros", False)),
    )
    optimizer = SimpleNamespace(
        prepare_grads=lambda: note("prepare", overflow),
        get_grad_norm=lambda: note("norm", torch.tensor(2.5)),
        get_loss_scale=lambda: torch.tensor(512.0),
        count_zeros=lambda: note("zeros", 17.0),
        step_with_ready_grads=lambda: note("update"),
    )
    sharding = SimpleNamespace(
        clip=lambda given, most, norm: note(f"clip {most} by {norm}"),
        finish_update=lambda given: note("finish"),
    )
    run: Any = SimpleNamespace(
        config=config, optimizer=optimizer, sharding=sharding, progress=SimpleNamespace(phase=""), device=NOTHING
    )
    result = steps.train_step(
        run, 4, lambda: note("before update"), lambda loss: note(("loss", loss.mean, loss.samples))
    )
    assert result == expected
    assert heard == [
        "gradients of 4",
        "before update",
        "prepare",
        "norm",
        ("add", overflow, 2.5),
        ("loss", 1.5, range(4)),
        ("check", 1.5, 4, "evidence"),
        *done,
        *([] if overflow else ["finish"]),
    ]
    monkeypatch.setattr(steps, "leaves_out", lambda run, batch: True)
    heard.clear()
    scale = expected.loss_scale
    assert steps.train_step(run, 4) == StepResult(0.0, 0, 4, False, None, scale, None)
    assert heard == [], "a step whose samples are all left out computes nothing"


def _held_out(*lengths: int) -> HeldOut:
    parts, start = [], 0
    for number, length in enumerate(lengths):
        parts.append(HeldOutPart(f"data/{number}", f"name {number}", range(start, start + length)))
        start += length
    loader: Any = SimpleNamespace(global_batch=lambda start, count, end: [(start, count, end)])
    return HeldOut(loader, tuple(parts))


def test_the_loss_of_each_source_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 6 of 3: of a source of 8 samples the second batch is a remainder. Means are over tokens. Chunks are
    evaluated with weights that are gathered, and train again afterwards."""
    heard: list[Any] = []
    losses = {(0, 2, 8): (2.0, 3), (6, 2, 8): (4.0, 1), (8, 2, 11): (NAN, 0), (11, 2, 17): (1.0, 6)}

    def held_out_loss(run: Any, microbatches: Any) -> tuple[float, int]:
        heard.append(microbatches[0])
        assert not torch.is_grad_enabled()
        return losses[microbatches[0]]

    @contextmanager
    def gathered() -> Any:
        heard.append("gathered")
        yield
        heard.append("scattered")

    monkeypatch.setattr(evaluate, "held_out_loss", held_out_loss)
    chunks = [
        SimpleNamespace(
            eval=lambda number=number: heard.append(f"eval {number}"),
            train=lambda number=number: heard.append(f"train {number}"),
        )
        for number in range(2)
    ]
    phases: list[str] = []
    run: Any = SimpleNamespace(
        config=small_config(training={"eval_global_batch_size": 6, "eval_micro_batch_size": 3}),
        chunks=chunks,
        gathered_parameters=gathered,
        progress=SimpleNamespace(loading=nullcontext, begin_batch=phases.append),
    )
    found = evaluate.evaluate_sources(run, _held_out(8, 3, 6))
    assert found.all == (2.0 * 3 + 4.0 + 6.0) / 10
    assert str(found.parts) == str((2.5, NAN, 1.0))
    assert heard == ["eval 0", "eval 1", "gathered", *losses, "scattered", "train 0", "train 1"]
    assert len(phases) == 4
    heard.clear()
    assert evaluate.evaluate(run, _held_out(8)) == 2.5


@pytest.mark.parametrize("sources", [1, 2])
def test_what_is_told_of_an_evaluation(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One source is no list of sources. The test data comes after the validation data, and only at the end."""
    monkeypatch.setattr(
        evaluation, "evaluate_sources", lambda run, data: evaluate.HeldOutLoss(2.0, (0.0, 4.0)[:sources])
    )
    monkeypatch.setattr(evaluation, "evaluate", lambda run, data: {"test": 8.0}[data])
    told: list[Any] = []
    state = TrainState(iteration=3, consumed_samples=50, scheduled_samples=40)
    run: Any = SimpleNamespace(state=state, config=small_config())
    trainer: Any = SimpleNamespace(run=run, finished=False, report_evaluation=told.append)
    test: Any = "test"
    callback = Evaluation(_held_out(*[4] * sources), test, 3, None, at_start=False)
    callback.on_start(trainer)
    callback.on_step_end(trainer, NOTHING)
    parts = (SourceLoss(name="data/0", suffix="name 0", loss=0.0), SourceLoss(name="data/1", suffix="name 1", loss=4.0))
    parts = parts if sources > 1 else ()
    first = ValidationMetrics(iteration=3, consumed_samples=50, validation_loss=2.0, sources=parts)
    assert told == [first]
    callback.on_end(trainer)
    assert told == [first], "a run that goes on later"
    trainer.finished = True
    callback.on_end(trainer)
    of_test = LossOfTest(iteration=3, consumed_samples=50, test_loss=8.0)
    assert told == [first, of_test], "this iteration's loss is known"
    state.iteration = 4
    told.clear()
    callback.on_end(trainer)
    again = [dataclasses.replace(first, iteration=4), dataclasses.replace(of_test, iteration=4)]
    assert told == again
    for valid, test, left in ((None, "test", again[1:]), (callback.valid, None, again[:1]), (None, None, [])):
        told.clear()
        Evaluation(valid, test, 3, None, at_start=False).on_end(trainer)  # pyright: ignore[reportArgumentType]
        assert told == left


@pytest.mark.parametrize(
    ("interval", "of_evaluations", "steps_of", "young"),
    [(3, 4, [3, 4, 6, 8], 1), (3, 0, [3, 6], 0), (0, 4, [4, 8], 1), (0, 0, [], 0)],
)
def test_which_garbage_is_collected_when(
    interval: int, of_evaluations: int, steps_of: list[int], young: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[tuple[int, ...]] = []
    heard: list[str] = []
    stand_in = SimpleNamespace(collect=lambda *of: collected.append(of))
    for name in ("disable", "freeze", "unfreeze", "enable"):
        setattr(stand_in, name, lambda name=name: heard.append(name))
    monkeypatch.setattr(garbage, "gc", stand_in)
    callback = GarbageCollection(interval, of_evaluations)
    trainer: Any = SimpleNamespace(run=SimpleNamespace(state=TrainState()))
    callback.on_start(trainer)
    assert (heard, collected) == (["disable", "freeze"], [()])
    seen = []
    for trainer.run.state.iteration in range(1, 9):
        collected.clear()
        callback.on_step_end(trainer, NOTHING)
        seen += [trainer.run.state.iteration] if collected == [()] else []
    assert seen == steps_of
    collected.clear()
    callback.on_evaluation(trainer, NOTHING)
    assert collected == [(0,)] * young
    callback.on_failure(trainer, ValueError())
    assert heard[2:] == ["unfreeze", "enable"]


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("found", [None, "checkpoint", "snapshot"])
@pytest.mark.parametrize("names", [{"load"}, {"load_hf"}, {"load", "load_hf"}, set()])
def test_what_a_run_begins_with(
    names: set[str], found: str | None, rank: int, finetune: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank; the first one says so."""
    if found is not None and "load" not in names:
        return
    heard: list[Any] = []
    monkeypatch.setattr(load, "load_found", lambda run, resume: heard.append("checkpoint"))
    monkeypatch.setattr(writer, "restore_snapshot", lambda run, iteration: heard.append(("snapshot", iteration)))
    monkeypatch.setattr(huggingface, "load_huggingface", lambda run, folder: heard.append(("weights", folder)))
    monkeypatch.setattr(datasets, "check_data_is_that_of_the_checkpoint", lambda run, resume: heard.append("compare"))
    monkeypatch.setattr(pretrain, "say", lambda text: heard.append(f"say {text}"))
    resume: Any = found and SimpleNamespace(is_snapshot=found == "snapshot", iteration=7, path=Path("memory/iter_7"))
    folders: dict[str, Any] = {name: f"folder of {name}" for name in names}
    flags = CheckpointConfig(**folders, finetune=finetune)
    run: Any = SimpleNamespace(rank=rank)
    pretrain._load(run, flags, resume)
    expected: list[Any] = []
    verb = "finetuning from" if finetune else "resuming at"
    if found is not None:
        expected += ["checkpoint" if found == "checkpoint" else ("snapshot", 7), *([] if finetune else ["compare"])]
    said = {
        None: "say checkpoint: starting afresh: none in folder of load",
        "checkpoint": f"say checkpoint: {verb} iteration 7 of folder of load",
        "snapshot": f"say checkpoint: {verb} iteration 7 of the snapshots in memory",
    }[found]
    expected += [said] if "load" in names and rank == 0 else []
    if "load_hf" in names and found is None:
        expected += [("weights", "folder of load_hf")]
        expected += ["say checkpoint: beginning with the weights of folder of load_hf"] if rank == 0 else []
    assert heard == expected


@pytest.mark.parametrize(
    ("saved", "finetune", "warns"),
    [
        (None, False, False),
        ({}, False, False),
        ({"seed": 5}, False, False),
        ({"seed": 0}, False, True),
        ({"seed": 0}, True, False),
        ({"seed": 5}, True, False),
    ],
)
def test_another_seed_than_the_checkpoints_is_told(saved: Any, finetune: bool, warns: bool) -> None:
    config = dataclasses.replace(
        small_config(training={"seed": 5}), checkpoint=CheckpointConfig(load="folder", finetune=finetune)
    )
    found = configure._other_seed(config, dataclasses.replace(Facts(), saved=saved))
    assert [text.partition(":")[0] for text in found] == (
        ["--seed 5, but the checkpoint in --load folder was saved with 0"] if warns else []
    )


@pytest.mark.parametrize("context", [1, 3])
def test_the_seeds_of_dropout_are_those_of_their_places(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed of the same place is another run. The engine is told the places that follow from no group."""
    seeds: list[int] = []
    told: list[Any] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(build, "model_parallel_cuda_manual_seed", lambda seed, **named: told.append((seed, named)))
    sizes = {"tp": (1, 8), "pp": (2, 8), "dp": (3, 8), "cp": (0 if context == 1 else 2, context), "ep": (4, 8)}
    group = {
        name: SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
        for name, (rank, size) in {**sizes, "expt_tp": (5, 8)}.items()
    }
    of_all: Any = SimpleNamespace(**group)
    build.seed_dropout(small_config(training={"seed": 9}), of_all)
    name = "dropout:9:2:3" if context == 1 else "dropout:9:2:3:2"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") // 2
    assert seeds == [seed]
    assert told == [(seed, {"tp_rank": 1, "ep_rank": 4, "etp_rank": 5, "force_reset_rng": True})]
