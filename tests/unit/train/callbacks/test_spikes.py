"""Further extras of the loop by themselves: garbage, sample ids, snapshots, timers, and which losses are spikes."""

import gc
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.data.samples import SampleWindow, Source
from megatron_ext.data.skipped import SkippedSamples
from megatron_ext.errors import NumericError, StorageError
from megatron_ext.train.callbacks import spikes, timing
from megatron_ext.train.callbacks.garbage import GarbageCollection
from megatron_ext.train.callbacks.sample_ids import SampleIds
from megatron_ext.train.callbacks.snapshots import Snapshots
from megatron_ext.train.callbacks.spikes import SpikeCheck
from megatron_ext.train.callbacks.timing import Timing
from megatron_ext.train.spikes import Computed, Place, Verdict
from megatron_ext.train.step import BatchLoss
from megatron_ext.train.trainer import Callback

NOTHING: Any = None


def _trainer(iteration: int, **run: Any) -> Any:
    state = SimpleNamespace(iteration=iteration, consumed_samples=4 * iteration)
    made = SimpleNamespace(state=state, rank=0, world_size=1, is_last_rank=True, recorder=None)
    vars(made).update(run)
    return SimpleNamespace(run=made)


def _steps(callback: Callback, trainer: Any, iterations: range, result: Any = NOTHING) -> None:
    for iteration in iterations:
        trainer.run.state.iteration, trainer.run.state.consumed_samples = iteration, 4 * iteration
        callback.on_step_end(trainer, result)


def test_garbage_is_collected_at_the_steps_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks at once: every third step, before an evaluation every fourth, and the youngest after it."""
    calls: list[str] = []
    for name in ("disable", "freeze", "unfreeze", "enable"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(gc, "collect", lambda generation=2: calls.append(f"{trainer.run.state.iteration}:{generation}"))
    trainer = _trainer(0)
    callback = GarbageCollection(3, 4)
    callback.on_start(trainer)
    _steps(callback, trainer, range(1, 13))
    callback.on_evaluation(trainer, NOTHING)
    callback.on_end(trainer)
    collected = [f"{iteration}:2" for iteration in (3, 4, 6, 8, 9, 12)]
    assert calls == ["disable", "0:2", "freeze", *collected, "12:0", "unfreeze", "enable"]
    calls.clear()
    callback = GarbageCollection(0, 0)
    _steps(callback, trainer, range(1, 13))
    callback.on_evaluation(trainer, NOTHING)
    callback.on_failure(trainer, KeyboardInterrupt())
    assert calls == ["unfreeze", "enable"]


def test_ids_are_those_of_the_samples_of_the_step(tmp_path: Path) -> None:
    """Four a step, without what is left out, under the number of the step; on the last rank alone."""
    samples = SimpleNamespace(
        sources=[Source("a", 10), Source("b", 20)], place=lambda index: SampleWindow(index % 2, 100 + index)
    )
    loaders = SimpleNamespace(samples=samples, skipped=SkippedSamples((range(5, 7),)))
    trainer = _trainer(0, loaders=loaders)
    callback = SampleIds(str(tmp_path / "ids.jsonl"), trainer.run)
    _steps(callback, trainer, range(1, 3), SimpleNamespace(global_batch_size=4))
    callback.on_end(trainer)
    rows = [json.loads(line) for line in (tmp_path / "ids.jsonl").read_text().splitlines()]
    assert rows == [
        {"iteration": 1, "sources": ["a", "b"], "samples": [[0, 100], [1, 101], [0, 102], [1, 103]]},
        {"iteration": 2, "sources": ["a", "b"], "samples": [[0, 104], [1, 107]]},
    ]
    trainer.run.is_last_rank = False
    callback = SampleIds(str(tmp_path / "other.jsonl"), trainer.run)
    _steps(callback, trainer, range(3, 4), SimpleNamespace(global_batch_size=4))
    callback.on_end(trainer)
    assert not (tmp_path / "other.jsonl").exists()


class _Writer:
    """Writes down what is done with it; the third snapshot cannot be written."""

    folder, bytes = Path("/dev/shm/run"), 2_500_000

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.problem: str | None = None

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))

    def take(self) -> float:
        self.calls.append("take")
        self.problem = "No space left on device" if self.calls.count("take") >= 3 else None
        return 0.125


def test_when_snapshots_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Every second step, but where a checkpoint is saved; what it costs is said once, and once that one has failed."""
    writer: Any = _Writer()
    trainer = _trainer(0, config=SimpleNamespace(training=SimpleNamespace(skip_train=False)))
    callback = Snapshots(writer, 2, 6)
    callback.on_start(trainer)
    _steps(callback, trainer, range(1, 13))
    taken = [("join",), "take"]
    assert writer.calls == [("remove_later",), *(taken * 4)], "at 2, 4, 8 and 10"
    said = capsys.readouterr()
    assert said.out.count("snapshots: every 2 steps to /dev/shm/run, 2.5 MB of rank 0; training stopped for 0.125") == 1
    assert said.err.count("rank 0 takes no snapshots any more: No space left on device") == 1
    writer.calls.clear()
    callback.on_failure(trainer, KeyboardInterrupt())
    assert writer.calls == [("join", 5.0)], "the last one may be written, and not for ever"
    writer.calls.clear()
    callback.on_end(trainer)
    assert writer.calls == [("forget",), ("join",)], "the run is saved"
    assert capsys.readouterr() == ("", "")
    writer.calls.clear()
    trainer.run.config.training.skip_train = True
    callback.on_end(trainer)
    assert writer.calls == []


def test_other_ranks_do_not_say_what_a_snapshot_costs(capsys: pytest.CaptureFixture[str]) -> None:
    writer: Any = _Writer()
    trainer = _trainer(0, rank=1)
    _steps(Snapshots(writer, 1, None), trainer, range(1, 3))
    assert writer.calls.count("take") == 2
    assert capsys.readouterr().out == ""


def test_times_are_of_the_steps_since_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on from step 4 has one step until step 5, then two."""
    told: list[tuple[Any, int]] = []
    monkeypatch.setattr(timing, "timers_text", lambda ranks, steps: told.append((ranks, steps)) or "times")
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, own: found.__setitem__(0, own))
    timers: Any = SimpleNamespace(take=lambda: {"optimizer": 1.5})
    callback, trainer = Timing(timers, 3), _trainer(4)
    _steps(callback, trainer, range(5, 13))
    times = [{"optimizer": 1.5}]
    assert told == [(times, 2), (times, 3), (times, 3)]
    assert capsys.readouterr().out == "times\n" * 3
    trainer.run.is_last_rank = False
    _steps(callback, trainer, range(13, 16))
    assert len(told) == 3


def _judged(
    monkeypatch: pytest.MonkeyPatch, losses: list[float], *, threshold: float = 2.0, differing: bool = False
) -> list[tuple[int, str, float]]:
    """The steps whose loss is judged: step, what is said of it, and the loss from which on a sample is guilty."""
    told: list[tuple[int, str, float]] = []
    states: list[int] = []
    verdict = Verdict({}, [Place(0, 0)] if differing else [], [])
    monkeypatch.setattr(spikes, "random_state", lambda run: run.state.iteration)

    def judge(run: Any, first: Any, samples: range, before: int) -> Verdict:
        states.append(before)
        assert (first, samples) == ("microbatches", range(run.state.iteration, run.state.iteration + 1))
        return verdict

    monkeypatch.setattr(spikes, "judge", judge)
    monkeypatch.setattr(
        spikes, "_data", lambda run, what, verdict, loss, limit: told.append((run.state.iteration, what, limit))
    )
    monkeypatch.setattr(spikes, "_hardware", lambda run, what, verdict: NumericError(what))
    callback, trainer = SpikeCheck(threshold), _trainer(0)
    of_microbatches: Any = "microbatches"
    for iteration, loss in enumerate(losses):
        trainer.run.state.iteration = iteration
        callback.on_step_begin(trainer)
        callback.on_loss(trainer, BatchLoss(loss, of_microbatches, range(iteration, iteration + 1)))
    assert states == [step for step, _, _ in told], "the generators are those of the step's beginning"
    return told


def test_which_losses_are_spikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than twice the median of at most 100 steps, of which there must be ten; and whatever is no number."""
    usual = [3.0] * 10
    assert _judged(monkeypatch, [*usual[:9], 100.0]) == [], "ten are needed"
    assert _judged(monkeypatch, [*usual, 6.0]) == [], "twice is not more than twice"
    assert _judged(monkeypatch, [*usual, 6.5]) == [
        (10, "the loss of iteration 11 is 6.5, 2.17 times the median of the last 11 steps", 6.0)
    ]
    assert _judged(monkeypatch, [*usual, 4.6], threshold=1.5) == [
        (10, "the loss of iteration 11 is 4.6, 1.53 times the median of the last 11 steps", 4.5)
    ]
    [(step, what, limit)] = _judged(monkeypatch, [3.0, math.nan, 3.0])
    assert (step, what, limit) == (1, "the loss of iteration 2 is nan", math.inf)
    assert [step for step, _, _ in _judged(monkeypatch, [*usual, math.inf, 6.5])] == [10, 11]
    # What is no number is not in the median, nor counted.
    for bad in (math.nan, math.inf, -math.inf):
        what = "the loss of iteration 15 is 6.5, 2.17 times the median of the last 11 steps"
        assert _judged(monkeypatch, [*usual, *[bad] * 4, 6.5])[-1] == (14, what, 6.0)
    # After a hundred steps of 1 the first ones are forgotten.
    assert [step for step, _, _ in _judged(monkeypatch, [100.0] * 51 + [1.0] * 51 + [2.5])] == [102]


def test_another_loss_of_the_same_samples_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NumericError, match=r"^the loss of iteration 11 is 9, 3 times the median of the last 11 steps$"):
        _judged(monkeypatch, [3.0] * 10 + [9.0], differing=True)


def test_samples_of_a_spike_are_written_down_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two replicas with two microbatches of two samples: those above the limit, the worst first, NaN worse than all;
    without what is left out. Only the first rank writes."""
    monkeypatch.setattr(
        spikes, "tokenizer_of_run", lambda config: SimpleNamespace(decode=lambda tokens: f"<{tokens[0]}>")
    )
    monkeypatch.setattr(spikes, "describe_sample", lambda train, sample: f"place {sample}")
    losses = {Place(0, 0): 2.0, Place(1, 0): 7.0, Place(0, 1): math.nan, Place(1, 1): 5.0}
    results = {
        place: [Computed(place.replica, loss), Computed(1 - place.replica, loss)] for place, loss in losses.items()
    }
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(save=str(tmp_path / "run")), training=SimpleNamespace(micro_batch_size=2)
    )
    train: Any = {sample: {"tokens": [sample]} for sample in range(20)}
    loaders = SimpleNamespace(skipped=SkippedSamples((range(15, 16),)), samples=train)
    groups = SimpleNamespace(dp=SimpleNamespace(size=lambda: 2))
    trainer = _trainer(6, config=config, loaders=loaders, groups=groups)
    of_microbatches: Any = None
    loss = BatchLoss(9.0, of_microbatches, range(8, 16))
    spikes._data(trainer.run, "it", Verdict(results, [], []), loss, 5.0)
    folder = tmp_path / "run" / "spike-7"
    rows = [json.loads(line) for line in (folder / "batch.jsonl").read_text().splitlines()]
    assert [(row["samples"], row["data_parallel_ranks"], row["microbatch"]) for row in rows] == [
        ([8, 9], [0, 1], 0),
        ([12, 13], [0, 1], 1),
        ([10, 11], [1, 0], 0),
        ([14, 15], [1, 0], 1),
    ]
    assert [row["iteration"] for row in rows] == [7] * 4
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [one["sample"] for one in samples] == [12, 13, 10, 11]
    assert samples[2] == {"sample": 10, "loss_of_microbatch": 7.0, "from": "place 10", "text": "<10>"}
    said = capsys.readouterr().err
    assert "it; the same samples again, on other ranks, have the same loss: it is the data, or the weights" in said
    assert f"--skip-samples {folder / 'samples.jsonl'}" in said
    spikes._data(trainer.run, "a resumed run that comes there again", Verdict(results, [], []), loss, 5.0)
    assert (folder / "samples.jsonl").read_text().count("\n") == 4
    trainer.run.rank, config.checkpoint.save = 1, str(tmp_path / "other")
    spikes._data(trainer.run, "it", Verdict(results, [], []), loss, 5.0)
    assert not (tmp_path / "other").exists()
    trainer.run.rank, config.checkpoint.save = 0, None
    groups.dp = SimpleNamespace(size=lambda: 1)
    spikes._data(trainer.run, "it", Verdict(results, [], []), loss, 5.0)
    said = capsys.readouterr().err
    assert "on the same ranks, which says nothing of a fault that repeats itself" in said
    assert "Samples 8-15; with --save they are written down" in said


def test_a_file_of_sample_ids_that_cannot_be_opened_is_named_by_its_own_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^cannot open .*/file/ids\.jsonl: .* with --log-sample-ids\.$"):
        SampleIds(str(tmp_path / "file" / "ids.jsonl"), _trainer(0).run)


@pytest.mark.parametrize(
    ("losses", "skipped", "guilty"),
    [
        ([2.0, math.nan, 3.0], [], [10, 11]),
        ([math.nan, 2.0, math.nan], [], [8, 9]),
        ([2.0, 7.0, 3.0], [], [10, 11]),
        ([2.0, 7.0, 3.0], [10, 11], [12, 13]),
        ([2.0, 7.0, 3.0], [10], [11]),
        ([2.0, 7.0, 3.0], [11], [10]),
    ],
)
def test_without_a_usual_loss_the_worst_microbatch_is_guilty(
    losses: list[float], skipped: list[int], guilty: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NaN is worse than any loss, wherever it stands; of several the first. What is left out is not guilty."""
    monkeypatch.setattr(spikes, "tokenizer_of_run", lambda config: SimpleNamespace(decode=lambda tokens: "text"))
    monkeypatch.setattr(spikes, "describe_sample", lambda train, sample: "place")
    results = {Place(0, number): [Computed(0, loss), Computed(0, loss)] for number, loss in enumerate(losses)}
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(save=str(tmp_path)), training=SimpleNamespace(micro_batch_size=2)
    )
    out = SkippedSamples(tuple(range(sample, sample + 1) for sample in skipped))
    loaders = SimpleNamespace(skipped=out, samples={sample: {"tokens": []} for sample in range(20)})
    groups = SimpleNamespace(dp=SimpleNamespace(size=lambda: 1))
    trainer = _trainer(6, config=config, loaders=loaders, groups=groups)
    of_microbatches: Any = None
    loss = BatchLoss(9.0, of_microbatches, range(8, 14))
    spikes._data(trainer.run, "it", Verdict(results, [], []), loss, math.inf)
    written = (tmp_path / "spike-7" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["sample"] for line in written] == guilty


def test_the_first_64_samples_of_a_spike_have_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spikes, "tokenizer_of_run", lambda config: SimpleNamespace(decode=lambda tokens: "text"))
    monkeypatch.setattr(spikes, "describe_sample", lambda train, sample: "place")
    loaders = SimpleNamespace(skipped=SkippedSamples(()), samples=[{"tokens": []}] * 70)
    run: Any = SimpleNamespace(config=None, loaders=loaders)
    rows = spikes._samples(run, [{"losses": [9.0], "samples": range(70)}])
    assert ["text" in row for row in rows] == [True] * 64 + [False] * 6
