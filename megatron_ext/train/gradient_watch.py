"""Remembers whether this rank's own gradients were finite before they were mixed with those of other ranks.

After the reduction every data-parallel rank holds the same NaN and nobody can say whose it was. So each bucket's
gradients are summed just before their reduction (one pass, no synchronization with the host); only when the
global norm turns out bad are those sums read, and the parameter looked for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from megatron_ext.model.names import global_named_parameters
from megatron_ext.optim.fsdp2 import TorchFSDP, unsharded_parameters
from megatron_ext.optim.megatron_fsdp import MegatronFSDPChunk
from megatron_ext.resilience.numeric import first_bad


class GradientWatch:
    def __init__(self, chunks: Sequence[_BaseDataParallel]):
        self._names: dict[int, str] = {id(parameter): name for name, parameter in global_named_parameters(chunks)}
        self._sums: list[tuple[Any, torch.Tensor]] = []
        self._sums_by_name: dict[str, torch.Tensor] = {}
        self.loss_is_finite = True
        for chunk in chunks:
            if isinstance(chunk, TorchFSDP):
                self._watch_shards(chunk)
            elif isinstance(chunk, MegatronFSDPChunk):
                with chunk.raw_parameters():
                    for name, weight in global_named_parameters([chunk]):
                        self._watch(name, weight)
            elif isinstance(chunk, DistributedDataParallel):
                for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    bucket_group.start_grad_sync = self._watching(bucket_group, bucket_group.start_grad_sync)

    def reset(self) -> None:
        """Forget the last step."""
        self._sums.clear()
        self._sums_by_name.clear()
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
        for name, total in self._sums_by_name.items():  # in the order of the backward pass
            if not bool(torch.isfinite(total)):
                return f"NaN or infinite values in the gradient of {name}"
        return None

    def _watch_shards(self, chunk: TorchFSDP) -> None:
        """A whole gradient lives only until its layer's reduction, so that each is summed as it is made."""
        names = {
            local: name
            for (local, _), (name, _) in zip(
                chunk.module.named_parameters(), global_named_parameters([chunk]), strict=True
            )
        }
        prefixes = {id(module): f"{name}." if name else "" for name, module in chunk.module.named_modules()}
        for unit in chunk.units:
            prefix = prefixes[id(unit)]
            # The gathered weights exist from the first forward pass on, and stay the same tensors.
            _at_first_forward(
                unit,
                lambda unit, prefix=prefix: [
                    self._watch(names[prefix + name], weight) for name, weight in unsharded_parameters(unit)
                ],
            )

    def _watch(self, name: str, weight: torch.Tensor) -> None:
        def add(gradient: torch.Tensor) -> None:
            total = gradient.sum(dtype=torch.float32)
            known = self._sums_by_name.get(name)
            self._sums_by_name[name] = total if known is None else known + total

        _before_other_uses(weight, add)

    def _watching(self, bucket_group: Any, start: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(start)
        def start_grad_sync(*args: Any, **kwargs: Any) -> None:
            already_started = bucket_group.grad_reduce_handle is not None
            if not already_started:
                self._sums.extend((bucket, bucket.grad_data.sum()) for bucket in bucket_group.buckets)
            start(*args, **kwargs)

        return start_grad_sync


def _at_first_forward(module: torch.nn.Module, action: Callable[[torch.nn.Module], object]) -> None:
    def run(module: torch.nn.Module, _inputs: object) -> None:
        handle.remove()
        action(module)

    handle = module.register_forward_pre_hook(run)


def _before_other_uses(weight: torch.Tensor, action: Callable[[torch.Tensor], None]) -> None:
    """Call `action` with every gradient of `weight`, once it is complete and before a wrapper takes it away."""

    def run(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        action(weight.grad)

    others: Any = weight._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    taken = list(others.items()) if others else []
    if others:
        others.clear()
    weight.register_post_accumulate_grad_hook(run)
    if taken:
        weight._post_accumulate_grad_hooks.update(taken)  # pyright: ignore[reportAttributeAccessIssue]
