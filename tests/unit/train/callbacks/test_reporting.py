"""What is reported next to the loss: tokens, samples, rates, over intervals of a clock that the test turns."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.data.samples import Source
from megatron_ext.plan.flops import flops_per_token
from megatron_ext.train.callbacks import reporting
from megatron_ext.train.callbacks.reporting import Reporting
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import StepResult
from tests.support.small_models import small_config

RANKS = 4
CURVE = OptimizerConfig(
    lr=1.0, weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=100 * 4 / 1000
)
"""Over 100 batches of 4: a thousandth for each sample of an update."""


class _Sink:
    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, metrics: Any) -> None:
        self.written.append(metrics)

    def close(self) -> None:
        """Nothing is open."""


def _trainer(state: TrainState) -> Any:
    memory = SimpleNamespace(max_allocated=3, allocated=2, reserved=4)
    device = SimpleNamespace(memory=lambda: memory, model_name="NVIDIA A100-SXM4-80GB")
    samples = SimpleNamespace(sources=[Source("a", 5)], counts=lambda consumed: [consumed])
    run = SimpleNamespace(
        state=state,
        config=dataclasses.replace(small_config(training={"train_iters": 100}), optimizer=CURVE),
        is_last_rank=True,
        world_size=RANKS,
        device=device,
        loaders=SimpleNamespace(samples=samples),
    )
    from megatron_ext.optim.curves import WeightDecayCurve

    return SimpleNamespace(run=run, learning_rate=0.25, weight_decay_curve=WeightDecayCurve.from_config(run.config))


def _reported(monkeypatch: pytest.MonkeyPatch, batches: list[int], seconds: list[float]) -> tuple[_Sink, _Sink, Any]:
    """Steps of so many samples, each after so many seconds; a log line every third, a step sink every second."""
    clock, sinks, state = [1000.0], (_Sink(), _Sink()), TrainState()
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: clock[0])
    report, trainer = Reporting([sinks[0]], 2, [sinks[1]], 3), _trainer(state)
    for number, (batch, duration) in enumerate(zip(batches, seconds, strict=True), 1):
        report.on_step_begin(trainer)
        clock[0] += duration
        state.iteration, state.consumed_samples = number, state.consumed_samples + batch
        state.consumed_tokens += 10 * batch
        state.scheduled_samples += batch // 2  # as if half of them had updated nothing
        state.interval_loss, state.interval_losses = state.interval_loss + number, state.interval_losses + 1
        report.on_step_end(trainer, StepResult(float(number), 10 * batch, batch, True, 0.5, 1.0, None))
        clock[0] += 77.0  # an evaluation, which is no training
    return *sinks, trainer.run.config


def test_intervals_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iteration 1 is logged by itself, then 3 and 6: two and three steps."""
    _, log, config = _reported(monkeypatch, [4, 8, 8, 16, 16, 32], [2.0, 1.0, 3.0, 0.5, 0.5, 3.0])
    length = config.model.seq_length
    tokens = [4 * length, 16 * length, 64 * length]
    seconds, steps = [2.0, 4.0, 4.0], [1, 2, 3]
    assert [row.iteration for row in log.written] == [1, 3, 6]
    rates = [number / time for number, time in zip(tokens, seconds, strict=True)]
    assert [row.tokens_per_second for row in log.written] == rates
    assert [row.elapsed_ms for row in log.written] == [1000.0 * t / n for t, n in zip(seconds, steps, strict=True)]
    flops = [flops_per_token(config) * rate / RANKS / 1e12 for rate in rates]
    assert [row.tflops_per_gpu for row in log.written] == flops
    assert [row.mfu for row in log.written] == [each / 312.0 for each in flops]
    assert [row.lm_loss for row in log.written] == [1.0, 2.5, 5.0]
    assert [row.consumed_samples for row in log.written] == [4, 20, 84]
    assert [row.consumed_tokens for row in log.written] == [40, 200, 840]
    assert [row.consumed_by_source["a"]["samples"] for row in log.written] == [4, 20, 84]
    assert [row.weight_decay for row in log.written] == pytest.approx([0.002, 0.010, 0.042])
    assert [row.global_batch_size for row in log.written] == [4, 8, 32]


def test_sinks_of_steps_get_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _, config = _reported(monkeypatch, [4, 8, 8, 16], [2.0, 1.0, 3.0, 0.5])
    assert [(row.iteration, row.lm_loss, row.elapsed_ms) for row in steps.written] == [
        (2, 2.0, 1000.0),
        (4, 4.0, 500.0),
    ]
    length = config.model.seq_length
    assert [row.tokens_per_second for row in steps.written] == [8 * length / 1.0, 16 * length / 0.5]


@pytest.mark.parametrize("step_sinks", [[], [_Sink()]])
def test_a_step_that_nobody_writes_has_no_metrics(step_sinks: list[Any]) -> None:
    """Asking the system for memory, and the rest of the metrics, took 0.13 ms a step."""
    state, asked = TrainState(), []
    trainer = _trainer(state)
    memory = trainer.run.device.memory
    trainer.run.device.memory = lambda: asked.append(state.iteration) or memory()
    report = Reporting(step_sinks, 1, [_Sink()], 3)
    for state.iteration in range(1, 8):
        report.on_step_begin(trainer)
        report.on_step_end(trainer, StepResult(1.0, 40, 4, True, 0.5, 1.0, None))
    assert asked == (list(range(1, 8)) if step_sinks else [1, 3, 6])


class _Stragglers:
    """Counts what it is asked, and when it forgets."""

    def __init__(self) -> None:
        self.asked = self.forgotten = 0

    def summary(self) -> dict[str, int]:
        self.asked += 1
        return {"rank": self.asked}

    def forget(self) -> None:
        self.forgotten += 1


def test_the_slowest_rank_is_that_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told on the last rank, and all ranks forget it with each log line; so do the sums of the state."""
    stragglers: Any = _Stragglers()
    for is_last in (True, False):
        sink, state = _Sink(), TrainState()
        trainer = _trainer(state)
        trainer.run.is_last_rank = is_last
        report = Reporting([], 1000, [sink], 2, None, stragglers)
        for iteration in range(1, 5):
            report.on_step_begin(trainer)
            state.iteration, state.interval_skipped, state.interval_nan = iteration, state.interval_skipped + 1, 1
            report.on_step_end(trainer, StepResult(1.0, 40, 4, False, None, 1.0, None))
        expected = [({"rank": 1}, 1), ({"rank": 2}, 1), ({"rank": 3}, 2)] if is_last else []
        assert [(row.slowest_rank, row.skipped_iterations) for row in sink.written] == expected
        assert [row.lm_loss for row in sink.written] == [1.0] * len(expected), "no step has updated: its own loss"
        assert (state.interval_skipped, state.interval_nan) == (0, 0)
        assert stragglers.forgotten == 3
        stragglers.forgotten = 0
