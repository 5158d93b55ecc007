"""Lets the host read a step's numbers while the next step is under way, so that a GPU always has work queued.

`train.step.train_step` computes loss, tokens, norm, whether all is finite and who asks to stop on the device. Where the
host reads them after the update, a guard on the device takes the place of the check: it decides whether the update
changes anything, and after a bad step no later update does, until the host has read the numbers and ends the run.
"""

import torch

from megatron_ext.optim.gradient_norm import GlobalNorm
from megatron_ext.optim.torch_optimizer import is_maskable, mask_by
from megatron_ext.sharding.parts import gradients_of_update
from megatron_ext.train.run import Run


def can_read_late(run: Run) -> bool:
    """Return whether nothing of a step needs its numbers before the update, and something is gained.

    A loss scale follows the overflows of the step before, and is megatron-core's on the host. Optimizers in host memory
    wait for the gradients in any case, as does the count of zeros for the host; QK-clip changes weights whatever the
    optimizer does.
    """
    if not run.device.reads_wait:
        return False
    training = run.config.training
    needs_them = (
        training.check_before_update
        or training.fp16
        or training.loss_scale is not None
        or run.config.logging.log_num_zeros_in_grad
        or run.qk_clip is not None
        or run.sharding.host_memory_flags
    )
    torch_optimizers = [one for part in run.sharding.parts(run.optimizer) for one in part.updater.torch_optimizers]
    return not needs_them and all(is_maskable(one, run.config.optimizer) for one in torch_optimizers)


class Guard:
    """Keeps bad steps from changing anything before the host has read of them.

    There is one for a run for which `can_read_late`, as it remembers a bad step.
    """

    def __init__(self, run: Run):
        self._run = run
        self._parts = run.sharding.parts(run.optimizer)
        self._closed = torch.zeros((), dtype=torch.float32, device=run.device.torch_device)
        """1 from a bad step on."""
        self._checks = not run.config.training.no_check_for_nan_in_loss_and_grad
        if self._checks:
            for part in self._parts:
                for optimizer in part.updater.torch_optimizers:
                    mask_by(optimizer, self._closed)

    def note(self, numbers: torch.Tensor, norm: GlobalNorm) -> None:
        """Close where `step_allreduce.check_numbers` is going to raise, and keep what its report needs.

        Args:
            numbers: of all ranks, as `SharedNumbers.summed` returns them.
            norm: whose gradients the next step overwrites.
        """
        if self._run.world_size == 1:
            weights = {id(gradient): weight for weight, gradient in gradients_of_update(self._parts)}
            counted = [weights[id(gradient)] for gradient in norm.gradients]
            self._run.gradient_watch.take_norms(counted, norm.of_each)
        if self._checks:
            loss_sum, tokens, bad_ranks = numbers[:3]
            bad = ~loss_sum.isfinite() | (tokens == 0) | (bad_ranks > 0)
            torch.maximum(self._closed, bad.float(), out=self._closed)

    def unless_closed(self, value: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Return `value`, or `otherwise` from a bad step on, without waiting for the device."""
        return torch.where(self._closed > 0, otherwise, value)

    def open(self) -> None:
        """Let later steps change weights again: the host has read of the bad one."""
        self._closed.zero_()
