"""Takes one optimizer step: microbatches -> pipeline schedule -> gradients -> update."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, cast

import torch

from megatron_ext import environment, terminal
from megatron_ext.config.derived.batch_size import evaluation_batch, num_microbatches
from megatron_ext.data.microbatch import Batch
from megatron_ext.errors import TrainingError
from megatron_ext.model.loss import summed_loss, token_loss
from megatron_ext.model.names import biases_of_experts
from megatron_ext.optim.gradient_norm import clipping_share, global_norm, norm_of, scale_gradients
from megatron_ext.optim.loss_scale import loss_scale_of
from megatron_ext.parts.catalogue import parameters
from megatron_ext.resilience.numeric import is_spoiled
from megatron_ext.resilience.progress import FORWARD_BACKWARD, UPDATE
from megatron_ext.train.deferred_reads import Guard
from megatron_ext.train.gradient_watch import Evidence
from megatron_ext.train.run import Run
from megatron_ext.train.step_allreduce import (
    SharedNumbers,
    StopVotes,
    Summed,
    check_numbers,
    largest_of_parts,
    mean_loss,
    named,
)


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
    """Result of a step, equal on every rank."""

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
    """Number of gradient entries that are exactly zero, without the vocabulary's padding."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the parts of the model report, by name (`parts/numbers.py`)."""


@dataclass(frozen=True)
class Gradients:
    """Results of a step's forward and backward passes, besides the gradients themselves."""

    samples: range
    """Positions of the samples of the global batch."""

    of_microbatches: torch.Tensor
    """fp32 [microbatches, 2]: see `run_microbatches`."""

    shared: SharedNumbers
    """This rank's part of the numbers of all ranks, with its loss."""

    evidence: Evidence
    """Observations of the gradient watch."""

    biases: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Biases by which experts are chosen, each with its updated value."""


@dataclass(frozen=True)
class TakenStep:
    """A step that the device has been given."""

    updated: bool
    """Whether the weights are updated."""

    result: Callable[[], tuple[StepResult, StopVotes | None]]
    """Waits for the step's numbers, with `run.state` as it was before the step. Returns the step's result, and who asks
    to stop; None where the ranks agree on that by themselves. Raises as `train_step` where that has not; then neither
    this step nor one after it has changed a weight."""


class StepNumbers:
    """The numbers of a step, which the host reads at their first use.

    Args:
        on_device: vectors of any length: "shared" of `SharedNumbers.summed`, the "squares" of the norm, the "share" of
            clipping, and the "largest" numbers that parts recorded.
        guard: as in `train_step`.
    """

    def __init__(
        self, run: Run, samples: int, gradients: Gradients, on_device: Mapping[str, torch.Tensor], guard: Guard | None
    ):
        self._run, self._samples, self._gradients, self._guard = run, samples, gradients, guard
        self._lengths = {name: len(vector) for name, vector in on_device.items()}
        self._wait = run.device.read_later(torch.cat([vector.double() for vector in on_device.values()]))

    @cached_property
    def read(self) -> Mapping[str, Sequence[float]]:
        """The numbers by their names. The first use waits for the device."""
        numbers = iter(self._wait())
        return {name: list(islice(numbers, length)) for name, length in self._lengths.items()}

    @property
    def summed(self) -> Summed:
        """The numbers that all ranks have added up."""
        return named(self.read["shared"])

    def check(self) -> None:
        """Raise as `train_step` where the step must not change a weight, with `run.state` as it was before it."""
        try:
            check_numbers(self._run, self.summed, self._samples, self._gradients.evidence)
        except TrainingError:
            if self._guard is not None:
                self._guard.open()
            raise

    def result(self, *, updated: bool, num_zeros: float | None) -> tuple[StepResult, StopVotes | None]:
        """Return as `TakenStep.result`."""
        self._run.progress.phase = UPDATE
        self.check()
        summed, read = self.summed, self.read
        result = StepResult(
            summed.loss,
            summed.tokens,
            self._samples,
            updated,
            norm_of(read["squares"]) if updated else None,
            _loss_scale(self._run),
            num_zeros,
            self._run.numbers.by_name(
                summed.of_parts,
                read["largest"],
                microbatches=len(self._gradients.of_microbatches),
                tokens=summed.tokens,
            ),
        )
        return result, None if self._guard is None else summed.votes


def train_step(
    run: Run,
    samples: range,
    before_update: Callable[[], None] = lambda: None,
    on_loss: Callable[[BatchLoss], None] = lambda loss: None,
    *,
    guard: Guard | None = None,
    votes: StopVotes | None = None,
) -> TakenStep:
    """Compute the gradients of a global batch and update the weights. Collective.

    Sums over all ranks, norm and clipping are computed on the device. The host reads the numbers and checks them before
    the update, or, with a guard, when somebody asks for the result.

    A step whose samples are all left out (--skip-samples) computes and updates nothing; its loss is 0.

    Args:
        samples: positions of its samples.
        before_update: called between the two.
        on_loss: called with the loss after that, also where it is NaN, while the weights are still the ones that gave
            the loss; never called with a guard.
        guard: keeps a bad step from changing anything; None where the numbers are read before the update.
        votes: whether this rank asks to stop, where all ranks' votes are to be added up.
    Raises:
        NumericError: the loss or a gradient is NaN or infinite on some rank (unless the check is off); no weight
            has been changed then. An overflow that the dynamic loss scale handles is no error. With a guard the result
            raises it.
        DataError: no token counts in the loss; with a guard the result raises it.
    """
    global_batch = len(samples)
    if run.loaders.skipped.covers(samples):
        left_out = StepResult(0.0, 0, global_batch, False, None, _loss_scale(run), None)
        return TakenStep(False, lambda: (left_out, None))
    gradients = compute_gradients(run, samples)
    if run.qk_clip is not None:
        run.qk_clip.take_scores()
    before_update()
    run.progress.phase = UPDATE
    overflow = run.optimizer.prepare_grads()
    norm = global_norm(run.optimizer, run.device.torch_device)  # also of an overflow: collective
    gradients.shared.add_gradients(overflow, norm.on_device())
    shared = gradients.shared.summed(votes or StopVotes())
    share = clipping_share(run.config.optimizer.clip_grad, norm.on_device())
    if guard is not None:
        guard.note(shared, norm)
        share = guard.unless_closed(share, torch.ones_like(share))  # for the report gradients stay as they are
    on_device = {"shared": shared, "squares": norm.squares, "share": share.view(1), "largest": largest_of_parts(run)}
    numbers = StepNumbers(run, global_batch, gradients, on_device, guard)
    if guard is None:
        on_loss(BatchLoss(numbers.summed.loss, gradients.of_microbatches, gradients.samples))
        run.progress.phase = UPDATE
        numbers.check()
    clips = run.config.optimizer.clip_grad > 0.0 and (guard is not None or numbers.read["share"][0] < 1.0)
    num_zeros = None if overflow else _update(run, gradients, share if clips else None, guard)
    return TakenStep(not overflow, partial(numbers.result, updated=not overflow, num_zeros=num_zeros))


def _update(run: Run, gradients: Gradients, share: torch.Tensor | None, guard: Guard | None) -> float | None:
    """Update the weights by gradients that are ready, times `share`, and return the count of zeros where it is asked
    for. Collective.

    Args:
        share: fp32 scalar on the device; None for 1.
    """
    if share is not None:
        scale_gradients(run.optimizer, share)
    num_zeros = _zeros_in_gradients(run) if run.config.logging.log_num_zeros_in_grad else None
    if run.qk_clip is not None:
        run.qk_clip.before_update()
    run.optimizer.step_with_ready_grads()
    run.sharding.finish_update(run.optimizer)
    for bias, moved in gradients.biases:
        bias.copy_(moved if guard is None else guard.unless_closed(moved, bias))
    return num_zeros


def compute_gradients(run: Run, samples: range) -> Gradients:
    """Run the forward and backward passes of the samples at these positions, and reduce the gradients. Collective."""
    if (loss_scale := loss_scale_of(run.optimizer)) is not None:
        loss_scale.tokens = len(samples) * run.config.model.seq_length
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    run.progress.phase = "the batch"
    with run.progress.loading():
        microbatches = run.loaders.train.global_batch(samples.start, num_microbatches(run.config, len(samples)))
    run.progress.begin_batch(FORWARD_BACKWARD)
    shared = SharedNumbers(run)
    evidence = run.gradient_watch.begin(shared.loss)
    biases = [(bias, bias.clone()) for _, bias in biases_of_experts(run.chunks)]
    with run.numbers.recording():
        losses = run_microbatches(run, microbatches, forward_only=False)
    moved = [(bias, bias.clone()) for bias, _ in biases]
    for bias, before in biases:  # megatron-core moves them with the last gradient, also before a step that is skipped
        bias.copy_(before)
    total = _sum(losses)
    if is_spoiled(run.config, samples, environment.rank()):
        terminal.warn(f"rank {environment.rank()} injects an error into the step of the samples from {samples.start}")
        total[0] = math.nan
    shared.add_loss(total)
    return Gradients(samples, losses, shared, evidence, moved)


def _zeros_in_gradients(run: Run) -> float:
    """Return the number of entries of the whole model's gradients that are exactly zero. Collective.

    The vocabulary's padding, of which every layout has another amount, does not count: its gradients are always
    zero."""
    padded = [(one, one.true_rows) for one in parameters(run.config) if one.true_rows is not None]
    return run.optimizer.count_zeros() - sum(one.size // one.shape[0] * (one.shape[0] - rows) for one, rows in padded)


def _loss_scale(run: Run) -> float:
    """Return the loss scale, without waiting for the device where there is none."""
    training = run.config.training
    return float(run.optimizer.get_loss_scale().item()) if training.fp16 or training.loss_scale else 1.0


def run_microbatches(
    run: Run, microbatches: list[Batch], *, forward_only: bool, micro_batch_size: int | None = None
) -> torch.Tensor:
    """Run the schedule over `microbatches` on every stage.

    Args:
        micro_batch_size: samples in one of them; default: --micro-batch-size.

    Returns:
        fp32 [microbatches, 2]: for each the sum of the losses of this rank's tokens that count, and their number. Of
        the ranks that hold the same loss all but one return zeros, so that the sum over all ranks is the sum over the
        global batch.
    """
    config = run.config
    depths = 0 if forward_only else config.model.mtp_num_layers or 0
    share = config.model.mtp_loss_scaling_factor / max(depths, 1)
    step = partial(_forward_step, summed=config.training.linear_cross_entropy, share=share)
    scales = _scales_of_depths(run, microbatches) if depths else None
    schedule, batches = run.schedule, partial(_on_device, scales=scales)
    if run.captured_passes is not None and not forward_only:
        schedule, batches = run.captured_passes, _one_by_one
    reports = schedule(
        forward_step_func=step,
        data_iterator=[batches(run, microbatches) for _ in run.chunks],
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


def _scales_of_depths(run: Run, microbatches: list[Batch]) -> torch.Tensor | None:
    """Return the tokens of the global batch that count over those that count in each depth of multi-token prediction,
    [depths]; None on a rank without depths. Collective over the ranks that share the last stage's tokens.

    All gradients are divided by the tokens that count. So a depth's loss, too, is a mean over the global batch, in
    every layout; a ratio of one rank's or microbatch's counts, which megatron-core takes, would be a mean of means.
    """
    if microbatches[0].ahead is None:
        return None
    batches = cast(list[Any], microbatches)
    of_each = [torch.cat([one.loss_mask.sum().view(1), one.ahead.weights.sum((0, 1))]) for one in batches]
    counts = torch.stack(of_each).sum(0, dtype=torch.float64).to(run.device.torch_device)
    torch.distributed.all_reduce(counts, group=run.groups.dp_cp)
    return (counts[0] / counts[1:].clamp(min=1.0)).float()


def _sum(losses: torch.Tensor) -> torch.Tensor:
    """Return the sum over the microbatches of `run_microbatches`, fp64 [2]."""
    return losses.sum(dim=0, dtype=torch.float64)


def _one_by_one(run: Run, microbatches: list[Batch]) -> Iterator[Batch]:
    for batch in microbatches:
        run.progress.begin_microbatch()
        yield batch


def _on_device(run: Run, microbatches: list[Batch], scales: torch.Tensor | None) -> Iterator[Batch]:
    for batch in _one_by_one(run, microbatches):
        moved = batch.to(run.device.torch_device)
        ahead = None  # an evaluation is of the next token alone
        if moved.ahead is not None and scales is not None:
            ahead = moved.ahead._replace(weights=moved.ahead.weights * scales)
        yield replace(moved, ahead=ahead)


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
    return mean_loss(loss_sum, tokens), int(tokens)


def _forward_step(
    batches: Iterator[Batch], model: torch.nn.Module, *, summed: bool, share: float
) -> tuple[torch.Tensor, Any]:
    """Run one model chunk on its next microbatch, as megatron-core's forward_step_func. If `summed`, the model itself
    sums the losses that count; `share` is the weight of each depth's."""
    batch = next(batches)
    # A stage before the last has no mask, and the engine never calls its loss.
    mask = cast(torch.Tensor, batch.loss_mask)
    output = model(
        batch.tokens,
        batch.position_ids,
        labels=batch.labels,
        documents=batch.documents,
        loss_mask=mask if summed else None,
        ahead=batch.ahead,
    )
    loss = summed_loss if summed else partial(token_loss, ahead=batch.ahead)
    return output, partial(loss, mask, share=share)
