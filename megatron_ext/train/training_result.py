"""The result of `pretrain`: how the run went, and where it wrote its files. This needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Trained:
    """Reports a run that has ended well. All but history and model is the same on every rank."""

    iteration: int
    """Number of the last step, counted from the beginning of the training, also before a resume."""

    losses: tuple[float, ...]
    """Mean loss per token of each step of this call, in nats, in order; the last is the loss of step `iteration`. A
    step whose samples are all left out has 0."""

    validation_losses: Mapping[int, float]
    """Loss of each evaluation of this call on the validation data, in nats, by the step after which it was made."""

    stop_reason: str | None
    """Reason why the run ended before the planned end, such as --exit-interval; None where it reached the end."""

    save: Path | None
    """Folder of the checkpoints (--save)."""

    metrics_file: Path | None
    """File with an object for each logged step (--metrics-file, or `metrics.jsonl` in --save)."""

    tensorboard_dir: Path | None
    """Folder of the TensorBoard log (--tensorboard-dir)."""

    history: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """Rows of the metrics file: one of iteration 1, of each --log-interval steps, and of each evaluation of this call.
    Only the last rank has them."""

    model: "tuple[torch.nn.Module, ...]" = field(default=(), repr=False)
    """This rank's model chunks where `returns_model` asks for them: in one process a single one, the whole model. They
    compute where no group of ranks is needed, so in one process; several ranks load the checkpoint again."""
