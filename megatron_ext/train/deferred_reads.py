"""Steps whose numbers are read a step later, so that a GPU always has work before it.

Loss, tokens, the norm, whether all is finite, and who asks to stop are one vector on the device, summed over all ranks.
Clipping multiplies by a coefficient on the device, and the update takes from there whether it changes anything: after a
bad step no later one does, until the host has read the vector and ends the run. The host reads it when the next step is
under way.

Nothing of that changes a number: the same products are rounded in the same way as in `train.step`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ext.errors import TrainingError
from megatron_ext.optim.gradient_norm import scale_by, squared_norm
from megatron_ext.optim.torch_optimizer import is_maskable, mask_by
from megatron_ext.resilience.progress import UPDATE
from megatron_ext.train.gradient_watch import Evidence
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult, compute_gradients
from megatron_ext.train.step_allreduce import StopVotes, check_numbers, summed


def can_read_late(run: Run) -> bool:
    """Return whether nothing of a step needs its numbers before the update, and something is gained.

    A loss scale follows the overflows of the step before, and is megatron-core's on the host. Optimizers in host memory
    wait for the gradients in any case, and with experts the host reads in every layer how many tokens each gets.
    """
    if not run.device.reads_wait:
        return False
    training = run.config.training
    needs_them = (
        training.check_before_update
        or training.fp16
        or training.loss_scale is not None
        or run.config.logging.log_num_zeros_in_grad
        or run.config.model.num_experts is not None
        or run.largest_scores is not None
        or run.sharding.host_memory_flags
    )
    return not needs_them and all(is_maskable(one, run.config.optimizer) for one in _torch_optimizers(run))


class LateStep:
    """A step that the device has been given.

    Args:
        read: waits for the numbers.
        guard: 1 on the device from a bad step on.
    """

    def __init__(
        self, run: Run, global_batch: int, evidence: Evidence, read: Callable[[], Sequence[float]], guard: torch.Tensor
    ):
        self._run, self._global_batch = run, global_batch
        self._evidence, self._read, self._guard = evidence, read, guard

    def result(self) -> tuple[StepResult, StopVotes | None]:
        """Wait for the numbers, with `run.state` as it was before the step.

        Returns:
            What the step did, and who asks to stop.
        Raises:
            NumericError, DataError: as in `train.step.train_step`; neither this step nor one after it has changed a
                weight.
        """
        run = self._run
        run.progress.phase = UPDATE
        *sums, square = self._read()
        totals = summed(sums, run.config.model.mtp_num_layers or 0)
        try:
            check_numbers(run, totals, self._global_batch, self._evidence)
        except TrainingError:
            self._guard.zero_()
            raise
        norm = square**0.5  # as megatron-core computes it on the host
        result = StepResult(totals.loss, totals.tokens, self._global_batch, True, norm, 1.0, None)
        return replace(result, mtp_losses=totals.mtp_losses), totals.votes


class LateSteps:
    """Begins steps of a run for which `can_read_late`. There is one for a run, as it remembers a bad step."""

    def __init__(self, run: Run):
        self._run = run
        self._guard = torch.zeros((), dtype=torch.float32, device=run.device.torch_device)
        self._weights = {
            id(main): weight for part in run.sharding.parts(run.optimizer) for weight, main in part.main_parameters()
        }
        self._checks = not run.config.training.no_check_for_nan_in_loss_and_grad
        if self._checks:
            for optimizer in _torch_optimizers(run):
                mask_by(optimizer, self._guard)

    def begin(self, samples: range, votes: StopVotes, before_update: Callable[[], None]) -> LateStep:
        """Give the device a global batch and the update. Collective.

        Args:
            samples: positions of its samples.
            votes: those of this rank.
            before_update: see `train.step.train_step`.
        """
        run = self._run
        gradients = compute_gradients(run, samples)
        before_update()
        run.progress.phase = UPDATE
        overflow = run.optimizer.prepare_grads()
        assert not overflow, "there is no loss scale"
        [part] = run.optimizer.chained_optimizers  # only experts have one of their own
        in_fp32, counted, of_each = squared_norm(part, run.device.torch_device)
        if run.world_size == 1:
            run.gradient_watch.take_norms(self._weights_of(part, counted), of_each)
        square = in_fp32.double()
        norm = square[0].sqrt()
        gradients.shared.add_gradients_of(norm)
        numbers = gradients.shared.summed_on_device(votes)
        read = run.device.read_later(torch.cat([numbers, square]))
        if self._checks:
            self._note(numbers)
        clip = run.config.optimizer.clip_grad
        if clip > 0.0:
            scale_by(part, self._share(clip, norm))
        run.optimizer.step_with_ready_grads()
        run.sharding.finish_update(run.optimizer)
        return LateStep(run, len(samples), gradients.evidence, read, self._guard)

    def _weights_of(self, part: MegatronOptimizer, gradients: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
        """Return the model's weights of some gradients of the update."""
        mains = {id(main.grad): main for main in part.get_parameters()}
        return [self._weights[id(mains[id(gradient)])] for gradient in gradients]

    def _note(self, numbers: torch.Tensor) -> None:
        """Close the guard where `check_numbers` is going to raise."""
        loss_sum, tokens, bad_ranks = numbers[:3]
        bad = ~loss_sum.isfinite() | (tokens == 0) | (bad_ranks > 0)
        torch.maximum(self._guard, bad.float(), out=self._guard)

    def _share(self, most: float, norm: torch.Tensor) -> torch.Tensor:
        """Return by what a norm of more than `most` is multiplied, fp32; gradients that change nothing stay as they are
        for the report."""
        share = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch and megatron-core
        return torch.where(self._guard > 0, torch.ones_like(share), share).float()


def _torch_optimizers(run: Run) -> list[torch.optim.Optimizer]:
    return [one for part in run.sharding.parts(run.optimizer) for one in part.updater.torch_optimizers]
