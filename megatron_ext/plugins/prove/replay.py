"""Takes a step of a run once more, in one process, from its checkpoint and its samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext import device as devices
from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG, iteration_folder, saved_iterations
from megatron_ext.checkpoint.native.extra_files import kept_tokenizer
from megatron_ext.config.parse.options import options, options_by_name
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.train.configure import Configured, configure
from megatron_ext.untrusted.metrics_rows import read_rows
from megatron_ext.untrusted.untrusted_folder import file_inside

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-2}
"""Relative tolerance between a layout and one process, due to rounding, by the dtype of the weights."""

_LEFT_OUT = ("layout", "checkpoint", "logging", "profiling")
_CHECKS = ("verify_data", "num_workers", "spike_threshold", "eval_interval", "eval_at_start", "start_eval_at_iter")
_CHECKS += ("check_weight_hash_across_dp_replicas_interval", "check_replicated_weights_interval", "exit_interval")
_CHECKS += (
    "exit_duration_in_mins",
    "full_validation",
    "multiple_validation_sets",
    "validation_set_names",
    "skip_train",
)


@dataclass(frozen=True)
class Step:
    """A step that was taken once more."""

    iteration: int
    samples: range
    """Positions in the order of the training."""
    loss: float
    """Mean over the steps since the last that was logged, as metrics.jsonl has it; in a step that was not logged, of
    this step."""
    grad_norm: float | None
    recorded_loss: float | None
    recorded_grad_norm: float | None

    @property
    def distance(self) -> float | None:
        """Relative distance of loss or norm, whichever is farther; None where nothing was recorded."""
        if self.recorded_loss is None:
            return None
        pairs = [(self.loss, self.recorded_loss)]
        if self.grad_norm is not None and self.recorded_grad_norm is not None:
            pairs.append((self.grad_norm, self.recorded_grad_norm))
        elif (self.grad_norm is None) != (self.recorded_grad_norm is None):
            return math.inf
        return max(_relative(*pair) for pair in pairs)


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    config: Config
    begun: int
    """Iteration of the checkpoint; 0 where it began from the seed."""
    steps: list[Step]
    notes: list[str]
    """Reasons why the numbers may differ from the run's."""


def replay(folder: Path, step: int, *, metrics: Path | None = None, device: str = "cpu") -> Replayed:
    """Take the steps from the newest checkpoint before `step` up to it.

    Args:
        folder: the run's --save folder.
        step: the iteration.
        metrics: the run's metrics file; default that in the folder.
        device: cpu or cuda.
    Raises:
        ConfigurationError: there is no such run or step, or one process cannot take it.
        DataError: data or checkpoint have changed since the run.
    """
    saved = saved_iterations(folder)
    if not saved or step < 1:
        raise ConfigurationError(f"{folder} holds no checkpoint of step {step} or before; give a --save folder")
    begun = max((iteration for iteration in saved if iteration < step), default=0)
    # The checkpoint after the step has the flags that the step was taken with.
    values = _flags(folder, next((iteration for iteration in saved if iteration >= step), saved[-1]))
    if not begun and (values.get("load_hf") or values.get("finetune")):
        raise ConfigurationError(
            f"{folder}: the run began with other weights than the seed's (--load-hf or --finetune); give a step after "
            f"its first checkpoint, iteration {saved[0]}"
        )
    words = to_words(_alone(values))
    words += ["--device", device, "--world-size", "1"]
    words += ["--load", str(folder), "--ckpt-step", str(begun), "--no-fallback"] if begun else []
    configured = configure(words)
    rows = _recorded(metrics or folder / "metrics.jsonl")
    interval = int(values.get("log_interval", options_by_name()["log_interval"].default))
    return Replayed(configured.config, begun, _steps(configured, step, interval, rows), _notes(values))


def _flags(folder: Path, iteration: int) -> dict[str, Any]:
    checkpoint = iteration_folder(folder, iteration)
    saved = read_saved(file_inside(checkpoint, CONFIG))
    if saved is None:
        raise ConfigurationError(f"{checkpoint} has no {CONFIG} that can be read; was it saved by this program?")
    gone = {
        field: path
        for field, path in kept_tokenizer(saved, checkpoint).items()
        if not Path(saved.get(field) or "").exists()
    }
    return {**saved, **gone}


def _alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that one process needs: without the layout, and without the settings of saving, logging and
    checks."""
    kept = {option.name for option in options() if option.group not in _LEFT_OUT and not option.saves_memory}
    needed = {name: value for name, value in values.items() if name in kept and name not in _CHECKS}
    return {
        **{name: value for name, value in needed.items() if value is not None},
        "eval_iters": 0,
        "num_workers": 0,
        "verify_data": "off",
    }


def _notes(values: Mapping[str, Any]) -> list[str]:
    notes = []
    if max(values.get("hidden_dropout", 0.0), values.get("attention_dropout", 0.0)) > 0.0:
        notes.append("dropout draws other masks unless the run was one process, too")
    if values.get("bf16") or values.get("fp16"):
        notes.append("16 bits round otherwise in another layout")
    return notes


def to_words(values: Mapping[str, Any]) -> list[str]:
    """Return values, by field name, as a command line."""
    words: list[str] = []
    for name, value in values.items():
        option = options_by_name()[name]
        if option.is_switch:
            words.append(f"{option.flag}={'true' if value else 'false'}")
        else:
            words += [option.flag, *(str(item) for item in (value if option.many else [value]))]
    return words


def _steps(configured: Configured, last: int, interval: int, rows: Mapping[int, Mapping[str, Any]]) -> list[Step]:
    layout = configured.config.layout
    here = devices.install(layout.device, nccl_backend=layout.nccl_backend)
    # Only now may megatron-core be imported.
    from megatron_ext.checkpoint.native.agreed_checkpoint import agree
    from megatron_ext.checkpoint.native.load_checkpoint import load_saved
    from megatron_ext.parallel import groups
    from megatron_ext.train.build import build_run
    from megatron_ext.train.datasets import check_data_is_that_of_the_checkpoint
    from megatron_ext.train.trainer import Trainer

    groups.start(configured.config.layout, here)
    config, resume = configured.config, None
    if configured.search is not None:
        resume = agree(configured.search, config.checkpoint)
    run = build_run(config, here, resume)
    if resume is not None:
        load_saved(run, resume)
        check_data_is_that_of_the_checkpoint(run, resume)
    trainer, state, steps = Trainer(run, []), run.state, []
    while state.iteration < last:
        if trainer.finished:
            raise ConfigurationError(f"the run ends after step {state.iteration}; give a step of it")
        first = state.consumed_samples
        result = trainer.step()
        row = rows.get(state.iteration, {})
        logged = state.iteration == 1 or state.iteration % interval == 0
        loss = state.interval_loss / state.interval_losses if logged and state.interval_losses else result.loss
        if logged:
            state.start_interval()
        samples = range(first, state.consumed_samples)
        numbers = (row.get("lm_loss") if logged else None, row.get("grad_norm") if logged else None)
        steps.append(Step(state.iteration, samples, loss, result.grad_norm, *numbers))
    run.release_graph()
    run.loaders.close()
    groups.destroy()
    return steps


def _recorded(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of steps by their iteration; none where there is no such file."""
    try:
        return {row["iteration"]: row for row in read_rows(path) if "lm_loss" in row}
    except FileNotFoundError:
        return {}


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other)) if math.isfinite(one) and math.isfinite(other) else math.inf
