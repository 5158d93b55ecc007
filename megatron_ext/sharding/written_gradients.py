"""megatron-core's DDP, whose first gradient of a step is written to the buffer in place of being added to zeros.

megatron-core zeroes its buffers at the beginning of a step, and every microbatch adds to them. Here the buffers keep
the gradients of the step before, and each weight's part expects its first gradient (device/weight_gradients.py). A part
that still expects it when its bucket is about to be reduced (on one rank alone, too) is zeroed, so that a weight that a
step does not use has no gradient of the step before. Padding between weights is zero from the start, and nothing writes
to it.

On a CPU, where no reduction waits for a gradient, autograd adds up the gradients of all microbatches by itself, and
they go to the buffer when the last backward pass is done; matrix products write to the buffer at once
(device/kernels.py).

The results equal sums with zeros bit for bit; only products that write to the buffer themselves could leave a -0.0, of
a sum that underflows.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_ext.device.weight_gradients import expect_first, takes_first, write_
from megatron_ext.errors import TrainingError
from megatron_ext.sharding.narrow import NarrowBuckets
from megatron_ext.sharding.scheme import Watcher


class WritingDataParallel(DistributedDataParallel):
    """Replicas of the weights of one model chunk, and the buffers of their gradients.

    Args:
        writes: whether first gradients are written. False where a package's kernel adds by itself: then buffers are
            zeroed.
        settings: arguments of megatron-core's class.
    """

    def __init__(self, *, writes: bool, **settings: Any):
        super().__init__(**settings)
        self.watchers: list[Watcher] = []
        """Watchers of the gradients of every bucket before its reduction."""
        self.narrow: list[NarrowBuckets] = []
        """Groups of buckets that are gathered in eight bits."""
        engine: Any = self  # whose `buffers` are not a module's
        late = writes and self._can_take_gradients_late(engine.module)
        if late:
            self.grad_accs.clear()  # the nodes of autograd, which megatron-core's hooks are on
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            weights = [weight for bucket in group.buckets for weight in bucket.params_list] if late else []
            hooks = [(weight, self._make_backward_post_hook(weight)) for weight in weights]
            group.start_grad_sync = completed(group, group.start_grad_sync, self.watchers, hooks)
        for buffer in (*engine.buffers, *engine.expert_parallel_buffers) if writes else ():
            buffer.reset = partial(_expect_first, buffer.params)

    def _can_take_gradients_late(self, model: torch.nn.Module) -> bool:
        """Return whether autograd may add up the gradients of a step by itself, and all go to the buffers at its end.

        Between a CPU's kernels a hook in Python takes some 30 us for each weight, 2% of a small model's step. It has to
        be where a reduction waits for it, and where the buffers add in another type."""
        trained: list[Any] = [weight for weight in model.parameters() if weight.requires_grad]
        if self.ddp_config.overlap_grad_reduce or self.config.gradient_accumulation_fusion:
            return False
        return all(one.device.type == "cpu" and one.main_grad.dtype == one.dtype for one in trained)

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        add: Any = super()._make_backward_post_hook(param)
        weight, overlaps = cast(Any, param), self.ddp_config.overlap_grad_reduce

        def hook(*unused: Any) -> None:
            gradient: torch.Tensor | None = weight.grad
            added, adds_all_the_same = weight.grad_added_to_main_grad, getattr(weight, "zero_out_wgrad", False)
            if gradient is None or (added and not adds_all_the_same) or not takes_first(weight.main_grad):
                return add(*unused)
            write_(weight.main_grad, gradient.data)
            if not overlaps:
                weight.grad = None
                return None
            # The engine's hook frees the gradient and counts the weight as ready; it must not add it to the buffer.
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = True, False
            try:
                add(*unused)
            finally:
                weight.grad_added_to_main_grad, weight.zero_out_wgrad = added, adds_all_the_same

        return hook


def completed(
    group: Any,
    start: Callable[..., None],
    watchers: Sequence[Watcher],
    hooks: Sequence[tuple[torch.nn.Parameter, Callable[[], None]]] = (),
) -> Callable[..., None]:
    """Return `start`, which reduces the buckets of `group`, after zeroes where no gradient came and after the watchers.

    Args:
        group: a group of buckets.
        start: its `start_grad_sync`.
        watchers: they look at the complete gradients of this rank.
        hooks: weights whose gradients autograd has kept, each with the function that moves its gradient to the buffer.
    """

    @wraps(start)
    def start_grad_sync(*args: Any, **kwargs: Any) -> None:
        for weight, take in hooks:
            if weight.grad is not None:
                take()
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
    """Raise where somebody has added a gradient to the gradient of the step before: zeroes would remove it."""
    if getattr(parameter, "grad_added_to_main_grad", False):
        raise TrainingError(
            f"a layer has added the gradient of a weight {tuple(parameter.shape)} to its main_grad itself, which holds "
            "the step before until its first gradient is written; have the layer return the gradient to autograd, or "
            "add it with megatron_ext.device.weight_gradients.add_"
        )


def _expect_first(parameters: Sequence[Any]) -> None:
    for parameter in parameters:
        parameter.grad = None  # of a backward pass that has failed
        expect_first(parameter.main_grad)
