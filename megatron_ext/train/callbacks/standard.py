"""Makes the callbacks that the flags ask for, in the order in which they hear of a step; and keeps the losses of a run
for what `pretrain` returns.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.registry import brought
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.signals import STOP_FILE, SignalWatcher
from megatron_ext.telemetry.log_line import Console
from megatron_ext.telemetry.metrics import Evaluated, Metrics, ValidationMetrics, as_row
from megatron_ext.telemetry.metrics_file import MetricsFile
from megatron_ext.telemetry.profiler import StepProfiler, open_range
from megatron_ext.telemetry.tensorboard import TensorBoardWriter
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.expert_load import ExpertLoad
from megatron_ext.train.callbacks.garbage import GarbageCollection
from megatron_ext.train.callbacks.large_gradients import LargeGradients, Overflows
from megatron_ext.train.callbacks.profiling import MemoryHistory, Profiling, is_recorded
from megatron_ext.train.callbacks.reporting import Reporting, Sink, Status
from megatron_ext.train.callbacks.sample_ids import SampleIds
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.train.callbacks.timing import Timing
from megatron_ext.train.datasets import DataCheck, blocks_of_run, share
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


def standard_callbacks(
    run: Run, signals: SignalWatcher, status: RunStatus, sinks: Sequence[Sink] = ()
) -> list[Callback]:
    """Return the callbacks: reports first, so that a step is on record before anything that follows it can fail;
    stopping last.

    Call it when the state is loaded: the files of an earlier run are cut back to the loaded iteration.

    Args:
        sinks: further places that the logged metrics go to, on the last rank.
    Raises:
        StorageError: a file cannot be opened.
        ConfigurationError: --wandb-project is given without the wandb package.
    """
    config = run.config
    logging = config.logging
    measures = [measure for measures_of in brought("measures") for measure in measures_of(run)]
    parts = [] if config.model.num_experts is None else [ExpertLoad()]
    callbacks: list[Callback] = [
        *measures,
        Status(status),
        *parts,
        Profiling(StepProfiler.from_config(config, run.rank, run.device), open_range(config)),
        Reporting(
            _step_sinks(run),
            logging.tensorboard_log_interval,
            [*_log_sinks(run), *(sinks if run.is_last_rank else ())],
            logging.log_interval,
            measures,
            parts,
        ),
    ]
    if is_recorded(config, run.rank):
        callbacks.append(MemoryHistory(config.profiling.memory_snapshot_path, run.rank, config.logging.log_interval))
    training = config.training
    if training.fp16 or training.loss_scale is not None:
        callbacks.append(Overflows(config))
    if training.check_for_large_grads:
        callbacks.append(LargeGradients())
    if training.manual_gc:
        callbacks.append(
            GarbageCollection(training.manual_gc_interval, 0 if training.no_manual_gc_eval else training.eval_interval)
        )
    callbacks.append(
        Evaluation(
            run.loaders.valid,
            run.loaders.test,
            training.eval_interval,
            config.logging.metrics_file,
            at_start=training.eval_at_start,
            first=training.start_eval_at_iter or 0,
        )
    )
    if config.data.verify_data == "background" and not config.data.mock_data:
        callbacks.append(DataCheck(share(blocks_of_run(config)[0])))
    callbacks += [callback for callbacks_of in brought("callbacks") for callback in callbacks_of(run)]
    if config.logging.log_sample_ids is not None:
        callbacks.append(SampleIds(config.logging.log_sample_ids, run))
    if config.logging.timing_log_level > 0:
        callbacks.append(Timing(run.timers, config.logging.log_interval))
    stops = (config.training.exit_interval, config.training.exit_duration_in_mins)
    callbacks.append(Stopping(signals, *stops, elastic=config.layout.elastic))
    if config.checkpoint.save is not None:
        from megatron_ext.train.callbacks.checkpointing import Checkpointing

        callbacks.append(
            Checkpointing(
                config.checkpoint.save,
                config.checkpoint.save_interval,
                background=config.checkpoint.async_save,
                outlives_failures=config.checkpoint.save_failure == "warn",
            )
        )
    return callbacks


def stop_file(config: Config) -> Path | None:
    """Return the file that stops the run when one does `touch` it."""
    return Path(config.checkpoint.save) / STOP_FILE if config.checkpoint.save else None


def _step_sinks(run: Run) -> list[Sink]:
    logging = run.config.logging
    sinks: list[Sink] = []
    if not run.is_last_rank:
        return sinks
    if logging.tensorboard_dir is not None:
        writer = TensorBoardWriter(logging.tensorboard_dir, run.state.iteration, run.state.consumed_samples)
        writer.write_arguments(_arguments(run.config))
        sinks.append(writer)
    sinks += [sink for sinks_of in brought("sinks") for sink in sinks_of(logging, _arguments(run.config))]
    return sinks


def _log_sinks(run: Run) -> list[Sink]:
    logging = run.config.logging
    if not run.is_last_rank:
        return []
    save = run.config.checkpoint.save
    sinks: list[Sink] = [Console(throughput=logging.log_throughput, form=logging.log_format, save=save)]
    if logging.metrics_file is not None:
        sinks.append(MetricsFile(logging.metrics_file, run.state.iteration))
    return sinks


def _arguments(config: Config) -> dict[str, Any]:
    """Return every resolved value by its flag's name."""
    groups = (getattr(config, group.name) for group in dataclasses.fields(Config))
    return {name: value for group in groups for name, value in dataclasses.asdict(group).items()}


class History(Callback):
    """Remembers the loss of every step, in 8 bytes, and of every evaluation on the validation data; as a sink of the
    logged metrics it remembers their rows, too."""

    def __init__(self) -> None:
        self.losses = array("d")
        self.validation_losses: dict[int, float] = {}
        self.rows: list[dict[str, Any]] = []

    def write(self, metrics: Metrics) -> None:
        """Keep the row that the metrics file has of a step or an evaluation."""
        self.rows.append(as_row(metrics))

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.losses.append(result.loss)

    def on_evaluation(self, trainer: Trainer, metrics: Evaluated) -> None:
        if isinstance(metrics, ValidationMetrics):
            self.validation_losses[metrics.iteration] = metrics.validation_loss
