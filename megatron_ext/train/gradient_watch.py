"""Remembers whether this rank's own gradients were finite before they were mixed with those of other ranks.

After the reduction every data-parallel rank holds the same NaN and nobody can say whose it was. So each bucket's
gradients are summed just before their reduction (one pass, no synchronization with the host); only when the
global norm turns out bad are those sums read, and the parameter looked for.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_ext.model.names import global_named_parameters
from megatron_ext.resilience.numeric import first_bad


class GradientWatch:
    def __init__(self, chunks: list[DistributedDataParallel]):
        self._names = {id(parameter): name for name, parameter in global_named_parameters(chunks)}
        self._sums: list[tuple[Any, torch.Tensor]] = []
        self.loss_is_finite = True
        for chunk in chunks:
            for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                bucket_group.start_grad_sync = self._watching(bucket_group, bucket_group.start_grad_sync)

    def reset(self) -> None:
        """Forget the last step."""
        self._sums.clear()
        self.loss_is_finite = True

    def diagnose(self) -> str | None:
        """What was wrong on this rank in this step: "NaN in the loss", "NaN in the gradient of ...", or None."""
        if not self.loss_is_finite:
            return "NaN or infinity in the loss"
        for bucket, total in self._sums:
            if bool(torch.isfinite(total)):
                continue
            bad = first_bad((self._names[id(p)], p.main_grad) for p in bucket.params_list)
            if bad is not None:
                name, nans, infinities = bad
                return f"{nans} NaN and {infinities} infinite values in the gradient of {name}"
        return None

    def _watching(self, bucket_group: Any, start: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(start)
        def start_grad_sync(*args: Any, **kwargs: Any) -> None:
            already_started = bucket_group.grad_reduce_handle is not None
            if not already_started:
                self._sums.extend((bucket, bucket.grad_data.sum()) for bucket in bucket_group.buckets)
            start(*args, **kwargs)

        return start_grad_sync
