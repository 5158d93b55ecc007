"""megatron-core's DDP, whose first gradient of a step is written to the buffer in place of being added to zeros.

megatron-core zeroes its buffers at the beginning of a step, and every microbatch adds to them. Here they keep what the
step before has left, and each weight's part expects its first gradient (device/weight_gradients.py). What expects it
still when its bucket is about to be reduced (of one rank alone, too) is zeroed: a weight that a step does not use has
no gradient of the step before. Padding between weights is zero from the start, and nothing writes there.

The bits are those of sums with zeros; only products of `--gradient-accumulation-fusion` could leave a -0.0, of a sum
that underflows.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_ext.device.weight_gradients import expect_first, takes_first, write_
from megatron_ext.errors import TrainingError
from megatron_ext.sharding.protocol import Watcher


class WritingDataParallel(DistributedDataParallel):
    """Replicas of the weights of one model chunk, and the buffers of their gradients.

    Args:
        writes: whether first gradients are written. False where a package's kernel adds by itself: then buffers are
            zeroed.
        settings: those of megatron-core's class.
    """

    def __init__(self, *, writes: bool, **settings: Any):
        super().__init__(**settings)
        self.watchers: list[Watcher] = []
        """They look at the gradients of every bucket before its reduction."""
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            group.start_grad_sync = completed(group, group.start_grad_sync, self.watchers)
        engine: Any = self  # whose `buffers` are not those of a module
        for buffer in (*engine.buffers, *engine.expert_parallel_buffers) if writes else ():
            buffer.reset = partial(_expect_first, buffer.params)

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        add: Any = super()._make_backward_post_hook(param)
        weight: Any = param

        def hook(*unused: Any) -> None:
            gradient: torch.Tensor | None = weight.grad
            added, adds_all_the_same = weight.grad_added_to_main_grad, getattr(weight, "zero_out_wgrad", False)
            if gradient is None or (added and not adds_all_the_same) or not takes_first(weight.main_grad):
                return add(*unused)
            write_(weight.main_grad, gradient.data)
            # The engine's hook takes the gradient away and counts the weight as ready; it must not add what is there.
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = True, False
            try:
                add(*unused)
            finally:
                weight.grad_added_to_main_grad, weight.zero_out_wgrad = added, adds_all_the_same

        return hook


def completed(group: Any, start: Callable[..., None], watchers: Sequence[Watcher]) -> Callable[..., None]:
    """Return `start`, which reduces the buckets of `group`, after zeroes where no gradient came and after the watchers.

    Args:
        group: a group of buckets.
        start: its `start_grad_sync`.
        watchers: they look at the complete gradients of this rank.
    """

    @wraps(start)
    def start_grad_sync(*args: Any, **kwargs: Any) -> None:
        already_started = group.grad_reduce_handle is not None
        for bucket in () if already_started else group.buckets:
            for parameter in bucket.params_list:
                if takes_first(parameter.main_grad):
                    _require_no_gradient(parameter)
                    parameter.main_grad.zero_()
            for watcher in watchers:
                watcher.before_reduction(bucket.params_list)
        start(*args, **kwargs)

    return start_grad_sync


def _require_no_gradient(parameter: Any) -> None:
    """Raise where somebody has added a gradient to what the step before left, which zeroes would take away."""
    if getattr(parameter, "grad_added_to_main_grad", False):
        raise TrainingError(
            f"a layer has added the gradient of a weight {tuple(parameter.shape)} to its main_grad itself, which holds "
            "the step before until its first gradient is written; have the layer return the gradient to autograd, or "
            "add it with megatron_ext.device.weight_gradients.add_"
        )


def _expect_first(parameters: Sequence[Any]) -> None:
    for parameter in parameters:
        expect_first(parameter.main_grad)
