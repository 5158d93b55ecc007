"""Reports the progress of the run: log line, metrics file, TensorBoard, Weights & Biases; and tells the failure report
which step is being worked on.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_ext.config.derived.batch_size import training_steps
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.data.samples import use_of_sources
from megatron_ext.optim.curves import weight_decay
from megatron_ext.parts.protocol import Report
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.telemetry.log_line import Console
from megatron_ext.telemetry.metrics import Evaluated, Metrics, SaveFailure, StepMetrics
from megatron_ext.telemetry.throughput import model_flops_utilization, tflops_per_gpu
from megatron_ext.train.callbacks.parameters_norm import parameters_norm
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class Sink(Protocol):
    """A place that metrics go to. Only the last rank has any."""

    def write(self, metrics: Metrics) -> None:
        """Write the metrics of a step or an evaluation."""

    def close(self) -> None:
        """Close the place; nothing more is written."""


class ReportReader(Protocol):
    """Reads the reports of the model's parts, besides single numbers."""

    def read(self, trainer: Trainer) -> Report:
        """Return the report of the step that has ended, equal on all ranks. Collective."""
        ...


class Measure(Callback):
    """Measures steps for their reports."""

    def measured(self, trainer: Trainer) -> dict[str, Any]:
        """Return fields of `StepMetrics` of the step that has ended and is reported. Collective."""
        return {}

    def forget(self) -> None:
        """Begin a new interval of the log."""


class Reporting(Callback):
    """Builds the metrics of a step and hands them on.

    Args:
        step_sinks: get steps that are multiples of `step_interval`, with that step's own loss (TensorBoard).
        log_sinks: get iteration 1 and multiples of `log_interval`, with the mean loss of the steps since the last
            one (log line, metrics file). The sums are part of the saved state: a resumed run logs the same means.
        measures: asked for what they have measured.
        parts: asked for their reports of the steps that go to `log_sinks`.
    """

    def __init__(
        self,
        step_sinks: Sequence[Sink],
        step_interval: int,
        log_sinks: Sequence[Sink],
        log_interval: int,
        measures: Sequence[Measure] = (),
        parts: Sequence[ReportReader] = (),
    ):
        self.step_sinks = step_sinks
        self.step_interval = step_interval
        self.log_sinks = log_sinks
        self.log_interval = log_interval
        self._measures = measures
        self._parts = parts
        self._counted_until = self._processor_until = 0.0
        self._under_way = 0  # steps begun and not ended
        self._resumed_at: int | None = None
        self._interval_seconds = self._interval_processor = 0.0
        self._interval_tokens = 0
        self._interval_steps = 0

    def on_step_begin(self, trainer: Trainer) -> None:
        if self._resumed_at is None:
            self._resumed_at = trainer.run.state.iteration
        if self._under_way == 0:  # what was done since the last step ended does not count
            self._counted_until, self._processor_until = time.perf_counter(), time.process_time()
        self._under_way += 1

    def ends_before_next(self, trainer: Trainer) -> bool:
        to_steps, to_log = self._wanted(trainer.position.iteration)
        # Parts count anew in the next step.
        reads_weights = trainer.run.config.logging.log_params_norm and (to_steps or to_log)
        return reads_weights or (bool(self._parts) and to_log)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        state, config = trainer.run.state, trainer.run.config
        now, processor_now = time.perf_counter(), time.process_time()
        seconds, self._counted_until = now - self._counted_until, now
        processor, self._processor_until = processor_now - self._processor_until, processor_now
        self._under_way -= 1
        self._interval_seconds += seconds
        self._interval_processor += processor
        self._interval_tokens += result.global_batch_size * config.model.seq_length
        self._interval_steps += 1
        to_steps, to_log = self._wanted(state.iteration)
        for sink in self.log_sinks:
            if isinstance(sink, Console):
                sink.alive(state.iteration, training_steps(config))
        if not (to_steps or to_log):
            return
        norm = parameters_norm(trainer.run) if config.logging.log_params_norm else None
        measured = {name: value for one in self._measures for name, value in one.measured(trainer).items()}
        reports = tuple(part.read(trainer) for part in self._parts) if to_log else ()
        if trainer.run.is_last_rank and (to_log or self.step_sinks):
            metrics = self._metrics(trainer, result, norm)
            metrics = dataclasses.replace(metrics, reports=reports, **measured)
            tokens = result.global_batch_size * config.model.seq_length
            own = {"lm_loss": result.loss, "elapsed_ms": 1000.0 * seconds, "tokens_per_second": tokens / seconds}
            own["cpu_ms"] = 1000.0 * processor
            for sink in self.step_sinks if to_steps else ():
                sink.write(dataclasses.replace(metrics, **own))
            for sink in self.log_sinks if to_log else ():
                sink.write(metrics)
        if to_log:
            state.start_interval()
            self._interval_seconds = self._interval_processor = 0.0
            self._interval_tokens = self._interval_steps = 0
            for one in self._measures:
                one.forget()

    def on_evaluation(self, trainer: Trainer, metrics: Evaluated) -> None:
        self._write(metrics)

    def on_save_failure(self, trainer: Trainer, failure: SaveFailure) -> None:
        self._write(failure)

    def _write(self, metrics: Evaluated | SaveFailure) -> None:
        for sink in (*self.step_sinks, *self.log_sinks):
            sink.write(metrics)

    def on_end(self, trainer: Trainer) -> None:
        self.close()

    def close(self) -> None:
        sinks = [*self.step_sinks, *self.log_sinks]
        self.step_sinks = self.log_sinks = ()
        for sink in sinks:
            sink.close()

    def _wanted(self, iteration: int) -> tuple[bool, bool]:
        """Return whether the step is written to the step sinks, and whether it is written to the log sinks."""
        return iteration % self.step_interval == 0, iteration == 1 or iteration % self.log_interval == 0

    def _metrics(self, trainer: Trainer, result: StepResult, norm: float | None) -> StepMetrics:
        run, state = trainer.run, trainer.run.state
        tokens_per_second = self._interval_tokens / self._interval_seconds
        tflops = tflops_per_gpu(flops_per_token(run.config), tokens_per_second, run.world_size)
        memory = run.device.memory()
        return StepMetrics(
            iteration=state.iteration,
            train_iters=training_steps(run.config),
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            lm_loss=state.interval_loss / state.interval_losses if state.interval_losses else result.loss,
            grad_norm=result.grad_norm,
            learning_rate=trainer.learning_rate,
            weight_decay=weight_decay(state.scheduled_samples, trainer.weight_decay_curve),
            global_batch_size=result.global_batch_size,
            loss_scale=result.loss_scale,
            skipped_iterations=state.interval_skipped,
            nan_iterations=state.interval_nan,
            elapsed_ms=1000.0 * self._interval_seconds / self._interval_steps,
            cpu_ms=1000.0 * self._interval_processor / self._interval_steps,
            tokens_per_second=tokens_per_second,
            tflops_per_gpu=tflops,
            mfu=model_flops_utilization(tflops, run.device.model_name),
            peak_memory_bytes=memory.max_allocated,
            allocated_bytes=memory.allocated,
            reserved_bytes=memory.reserved,
            num_zeros=None if result.num_zeros is None else int(result.num_zeros),
            params_norm=norm,
            numbers=run.numbers.with_values(result.numbers),
            world_size=run.world_size,
            resumed_at=self._resumed_at or 0,
            consumed_by_source=use_of_sources(run.loaders.samples, state.consumed_samples, run.config.model.seq_length),
        )


class Status(Callback):
    """Notes the step in the failure report."""

    def __init__(self, status: RunStatus):
        self._status = status

    def on_step_begin(self, trainer: Trainer) -> None:
        self._status.iteration = trainer.position.iteration + 1

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        # The next step was begun already where numbers are read late.
        begun, after = self._status.iteration, trainer.position.iteration + 1
        self._status.iteration = after if begun is None else min(begun, after)
