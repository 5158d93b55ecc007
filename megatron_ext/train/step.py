"""Takes one optimizer step: microbatches -> pipeline schedule -> gradients -> update."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.config.batch import evaluation_batch, num_microbatches
from megatron_ext.config.layers import stack
from megatron_ext.config.schema import Config
from megatron_ext.data.batch import Batch
from megatron_ext.errors import DataError, NumericError
from megatron_ext.model.loss import summed_loss, token_loss
from megatron_ext.model.moe import take_auxiliary_losses
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parallel.rows import local_part
from megatron_ext.resilience.numeric import first_bad, largest_magnitude
from megatron_ext.resilience.progress import FORWARD_BACKWARD, UPDATE
from megatron_ext.sharding.gradients import gradients_of_update, outside_norm
from megatron_ext.train.gradient_watch import Finding
from megatron_ext.train.run import Run


@dataclass(frozen=True)
class AuxiliaryLosses:
    """Holds what the routers of a mixture of experts add to the loss, each a mean over layers and microbatches, without
    its coefficient. A loss is None where it is not part of the loss."""

    load_balancing: float | None
    z: float | None


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a step, before its update."""

    mean: float
    """Mean loss per token over the global batch, in nats; equal on every rank."""

    of_microbatches: torch.Tensor
    """fp32 [microbatches, 2]: see `run_microbatches`."""

    samples: range
    """Positions of the samples of the global batch."""


@dataclass(frozen=True)
class StepResult:
    """Reports what a step did. It is equal on every rank."""

    loss: float
    """Mean loss per token over the global batch, in nats."""

    tokens: int
    """Number of tokens that counted in the loss."""

    global_batch_size: int

    updated: bool
    """Whether the weights were updated; False when the fp16 loss scale skipped the update."""

    grad_norm: float | None
    """L2 norm of the global gradient before clipping; None for a skipped step."""

    loss_scale: float
    num_zeros: float | None
    auxiliary_losses: AuxiliaryLosses | None = None
    """Auxiliary losses of a mixture of experts."""


def train_step(
    run: Run,
    global_batch: int,
    before_update: Callable[[], None] = lambda: None,
    on_loss: Callable[[BatchLoss], None] = lambda loss: None,
) -> StepResult:
    """Compute the gradients of the next `global_batch` samples and update the weights.

    A step whose samples are all left out (--skip-samples) computes and updates nothing; its loss is 0.

    Args:
        before_update: called between the two.
        on_loss: called with the loss after that, also where it is NaN, when the weights are still those of the loss.
    Raises:
        NumericError: the loss or a gradient is NaN or infinite on some rank (unless the check is off); no weight
            has been changed then. An overflow that the dynamic loss scale handles is no error.
        DataError: no token counts in the loss.
    """
    first = run.state.consumed_samples
    samples = range(first, first + global_batch)
    if run.loaders.skipped.covers(samples):
        return StepResult(0.0, 0, global_batch, False, None, _loss_scale(run), None)
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    run.progress.phase = "the batch"
    with run.progress.loading():
        microbatches = run.loaders.train.global_batch(first, num_microbatches(run.config, global_batch))
    run.progress.begin_batch(FORWARD_BACKWARD)
    share = _Share(run)
    run.gradient_watch.reset(share.loss)
    losses = run_microbatches(run, microbatches, forward_only=False)
    share.add_loss(_sum(losses))
    auxiliary = _auxiliary_losses(run, len(microbatches)) if run.config.model.num_experts is not None else None
    before_update()
    run.progress.phase = UPDATE
    overflow = run.optimizer.prepare_grads()
    grad_norm = float(run.optimizer.get_grad_norm())  # also of an overflow: collective, and another rank may have none
    share.add_gradients(overflow, grad_norm)
    loss, tokens, bad_ranks, overflowed_ranks = share.summed()
    on_loss(BatchLoss(loss, losses, samples))
    run.progress.phase = UPDATE
    loss_scale = _loss_scale(run)
    if not run.config.training.no_check_for_nan_in_loss_and_grad:
        if tokens == 0:
            raise _nothing_counts(run, global_batch)
        if not math.isfinite(loss):
            raise _numeric_error(run, "loss")
        if bad_ranks or 0 < overflowed_ranks < run.world_size:
            raise _numeric_error(run, "gradient")
    if overflow:
        return StepResult(loss, tokens, global_batch, False, None, loss_scale, None, auxiliary)
    clip = run.config.optimizer.clip_grad
    if clip > 0.0:
        run.sharding.clip(run.optimizer, clip, grad_norm)
    num_zeros = run.optimizer.count_zeros() if run.config.logging.log_num_zeros_in_grad else None
    run.optimizer.step_with_ready_grads()
    run.sharding.finish_update(run.optimizer)
    return StepResult(loss, tokens, global_batch, True, grad_norm, loss_scale, num_zeros, auxiliary)


def _loss_scale(run: Run) -> float:
    """Return the loss scale, without waiting for the device where there is none."""
    training = run.config.training
    return float(run.optimizer.get_loss_scale().item()) if training.fp16 or training.loss_scale else 1.0


class _Share:
    """Holds what this rank contributes to the one vector that every step sums over all ranks."""

    def __init__(self, run: Run):
        self._run = run
        self._vector = torch.zeros(4, dtype=torch.float64, device=run.device.torch_device)
        self.loss = self._vector[0].clone()

    def add_loss(self, share: torch.Tensor) -> None:
        self._vector[:2] = share
        self.loss.copy_(share[0])

    def add_gradients(self, overflow: bool, grad_norm: float) -> None:
        """Return whether a gradient is NaN or infinite here, in the norm or not; an overflow of the loss scale is not
        bad."""
        if overflow:
            self._vector[3] = 1.0
        elif math.isfinite(grad_norm):
            # NaN and infinity in any other gradient show in the norm. It does not wait for the device.
            left_out = largest_magnitude(outside_norm(self._run.optimizer), self._vector.device)
            self._vector[2] = ~left_out.isfinite()
        else:
            self._vector[2] = 1.0

    def summed(self) -> tuple[float, int, int, int]:
        """Return mean loss, tokens, number of ranks with a bad gradient, number of ranks with an overflow.
        Collective."""
        if self._run.world_size > 1:
            torch.distributed.all_reduce(self._vector)
        loss_sum, tokens, bad, overflowed = self._vector.tolist()
        return _mean(loss_sum, tokens), int(tokens), int(bad), int(overflowed)


def run_microbatches(
    run: Run, microbatches: list[Batch], *, forward_only: bool, micro_batch_size: int | None = None
) -> torch.Tensor:
    """Run megatron-core's schedule over `microbatches` on every stage.

    Args:
        micro_batch_size: samples in one of them; default that of the training.

    Returns:
        fp32 [microbatches, 2]: for each the sum of the losses of this rank's tokens that count, and their number. Zero
        but on one rank of those that hold the same loss, so that the sum over all ranks is that over the global batch.
    """
    config = run.config
    step = _summed_forward_step if config.training.linear_cross_entropy else _forward_step
    reports = get_forward_backward_func(run.groups.pp.size(), _virtual_size(config))(
        forward_step_func=step if run.recorder is None else run.recorder.watched(step),
        data_iterator=[_on_device(run, microbatches) for _ in run.chunks],
        model=list(run.chunks),
        num_microbatches=len(microbatches),
        seq_length=config.model.seq_length,
        micro_batch_size=micro_batch_size or config.training.micro_batch_size,
        forward_only=forward_only,
        pg_collection=run.groups,
        p2p_communicator=run.p2p,
    )
    # Only the last stage has the loss, and tensor-parallel ranks hold the same.
    if run.is_last_stage and run.groups.tp.rank() == 0:
        return torch.stack([report["lm loss"] for report in reports])
    return torch.zeros(len(microbatches), 2, device=run.device.torch_device)


def _sum(losses: torch.Tensor) -> torch.Tensor:
    """Return the sum of what `run_microbatches` gives, fp64 [2]."""
    return losses.sum(dim=0, dtype=torch.float64)


def _on_device(run: Run, microbatches: list[Batch]) -> Iterator[Batch]:
    for batch in microbatches:
        run.progress.begin_microbatch()
        yield batch.to(run.device.torch_device)


def held_out_loss(run: Run, microbatches: list[Batch]) -> tuple[float, int]:
    """Run only the forward pass.

    Returns:
        The mean loss per token over the microbatches of all ranks (NaN where no token counts), and the number of
        those tokens.
    """
    micro_batch_size = evaluation_batch(run.config)[1]
    total = _sum(run_microbatches(run, microbatches, forward_only=True, micro_batch_size=micro_batch_size))
    if run.world_size > 1:
        torch.distributed.all_reduce(total)
    loss_sum, tokens = total.tolist()
    return _mean(loss_sum, tokens), int(tokens)


def _mean(loss_sum: float, tokens: float) -> float:
    return loss_sum / tokens if tokens else math.nan


def _auxiliary_losses(run: Run, microbatches: int) -> AuxiliaryLosses:
    """Collect what the routers of all ranks recorded in this step. Collective."""
    total = torch.tensor(take_auxiliary_losses(run.groups), dtype=torch.float64, device=run.device.torch_device)
    if run.world_size > 1:
        torch.distributed.all_reduce(total)
    model = run.config.model
    routers = stack(run.config).count(lambda layer: layer.experts is not None)
    load_balancing, z = (total / (microbatches * routers)).tolist()
    return AuxiliaryLosses(
        load_balancing=load_balancing if model.load_balancing_coefficient else None,
        z=z if model.moe_z_loss_coeff is not None else None,
    )


def _virtual_size(config: Config) -> int | None:
    size = config.layout.virtual_pipeline_model_parallel_size
    return size if size > 1 else None


def _forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run one model chunk on its next microbatch, as megatron-core's forward_step_func."""
    batch = next(batches)
    output = model(batch.tokens, batch.position_ids, labels=batch.labels, documents=batch.documents)
    # A stage before the last has no mask, and the engine never calls its loss.
    return output, partial(token_loss, cast(torch.Tensor, batch.loss_mask))


def _summed_forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run one model chunk likewise, whose last stage returns the sum of the losses that count."""
    batch = next(batches)
    mask = cast(torch.Tensor, batch.loss_mask)
    output = model(batch.tokens, batch.position_ids, labels=batch.labels, documents=batch.documents, loss_mask=mask)
    return output, partial(summed_loss, mask)


def _nothing_counts(run: Run, global_batch: int) -> DataError:
    return DataError(
        f"iteration {run.state.iteration + 1} (samples from {run.state.consumed_samples}): not one token of its "
        f"{global_batch} samples counts in the loss. Look at them (tools/inspect_dataset.py sample), and give a larger "
        "--global-batch-size or other data"
    )


def _numeric_error(run: Run, what: str) -> NumericError:
    """Ask every rank what it saw, and name the cause. Called by all ranks."""
    seen: list[tuple[Finding | None, ...]] = [()] * run.world_size
    torch.distributed.all_gather_object(seen, (_bad_weight(run), run.gradient_watch.diagnose(), _bad_reduced(run)))
    weight, gradient, reduced = (_cause(findings) for findings in zip(*seen, strict=True))
    when = f"iteration {run.state.iteration + 1} (samples from {run.state.consumed_samples})"
    unchecked = "--no-check-for-nan-in-loss-and-grad goes on regardless."
    if weight is not None:
        return NumericError(
            f"{weight}, at the start of {when}: an earlier update, or the memory of that rank, made it so. Next: "
            f"resume from a checkpoint that was saved before it (--ckpt-step); if it happens again at the same step, "
            f"lower --lr; if not, suspect the hardware. {unchecked}"
        )
    where = f"the {what} became bad between the ranks: every rank's own part is finite"
    return NumericError(
        f"{gradient or reduced or where}, {when}. This iteration changed no weight. Next: resume from the last "
        "checkpoint; if it happens again at the same step, lower --lr or look at those samples; if not, suspect the "
        f"hardware. {unchecked}"
    )


def _cause(findings: Sequence[Finding | None]) -> str | None:
    """Return of what the ranks found the cause of the rest: what a backward pass comes to first, on the lowest rank."""
    found = [(finding.place, -rank, finding.text) for rank, finding in enumerate(findings) if finding is not None]
    if not found:
        return None
    _, negative_rank, text = max(found)
    return f"rank {-negative_rank}: {text}"


def _bad_weight(run: Run) -> Finding | None:
    """Return the first weight of this rank, in the order of a forward pass, that was bad before this step.
    Collective."""
    with run.gathered_parameters():
        bad = first_bad((name, local_part(weight).detach()) for name, weight in global_named_parameters(run.chunks))
    return bad and Finding((0, 0), f"{bad.nan} NaN and {bad.inf} infinite values in the weight {bad.name}")


def _bad_reduced(run: Run) -> Finding | None:
    return run.gradient_watch.in_reduced_gradients(gradients_of_update(run.sharding.parts(run.optimizer)))
