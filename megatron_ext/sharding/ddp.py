"""megatron-core's DDP: weights whole on every data-parallel rank, and with the distributed optimizer (ZeRO-1) its state
in shards, each a flat range of all weights one after another.

megatron-core's DDP, whose first gradient of a step is written to the buffer in place of being added to zeros.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.device.device_protocol import Device
from megatron_ext.device.weight_gradients import expect_first, products_write, takes_first, write_
from megatron_ext.errors import TrainingError
from megatron_ext.model.loss import OutputLayer
from megatron_ext.model.names import catalogued
from megatron_ext.optim.settings import optimizer_config
from megatron_ext.sharding.engine import (
    build_optimizer,
    ddp_config,
    for_chunks,
    initialized,
    updating,
)
from megatron_ext.sharding.flat_shards import FlatPart
from megatron_ext.sharding.parts import OptimizerPart
from megatron_ext.sharding.scheme import Reduced, Sharding, Watcher


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


class DataParallel(Sharding):
    """Replicas of the weights, with or without the distributed optimizer."""

    def shard(
        self,
        chunks: Sequence[torch.nn.Module],
        core: TransformerConfig,
        groups: ProcessGroupCollection,
        device: Device,
    ) -> list[WritingDataParallel]:
        """Wrap every model chunk in megatron-core's DDP, and wire its hooks into the pipeline schedule.

        The schedule must know when it may skip the reduction (all microbatches but the last) and, with overlap,
        when to start one; without these hooks accumulation silently drifts.
        """
        settings = ddp_config(self.config)
        writes = not self.config.training.gradient_accumulation_fusion or products_write()
        wrapped = [
            WritingDataParallel(
                writes=writes,
                config=core,
                ddp_config=settings,
                module=chunk,
                pg_collection=groups,
                # Later chunks of an interleaved stage reduce while others still compute: one bucket is enough.
                disable_bucketing=index > 0,
                full_param_layout=self._whole_matrices(chunk, settings, groups),
            )
            for index, chunk in enumerate(initialized(chunks, self.config, core, groups, device))
        ]
        if settings.overlap_grad_reduce:
            core.no_sync_func = for_chunks([chunk.no_sync for chunk in wrapped])
            core.grad_sync_func = for_chunks([chunk.start_grad_sync for chunk in wrapped])
        if settings.overlap_param_gather:
            core.param_sync_func = for_chunks([chunk.start_param_sync for chunk in wrapped])
            for chunk in wrapped:
                _hook_modules_that_read(chunk)
        return wrapped

    def _whole_matrices(
        self, chunk: torch.nn.Module, settings: DistributedDataParallelConfig, groups: ProcessGroupCollection
    ) -> FullParamLayout | None:
        """Return where the weights lie in the buffers such that no rank's range begins or ends within a matrix, where
        the optimizer needs that: megatron-core's layout for its layer-wise optimizer, under its distributed one."""
        if not (self.config.layout.sharding.optimizer and traits_of(self.config.optimizer).needs_whole_matrices):
            return None
        known = catalogued([chunk], self.config)
        for weight in chunk.parameters():
            vars(weight)["is_managed_by_layer_wise_optimizer"] = known[id(weight)].update == "matrix"
        return LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(chunk.parameters()),
            settings.bucket_size if settings.overlap_grad_reduce else None,
            groups.intra_dp_cp.size(),
            settings,
            expert_data_parallel_world_size=groups.intra_expt_dp.size(),
        )

    def optimizer(
        self, chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection, device: Device
    ) -> ChainedOptimizer:
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            vars(weight).pop("is_managed_by_layer_wise_optimizer", None)  # or the distributed one would leave it out
        settings = optimizer_config(
            self.config,
            distributed=self.config.layout.sharding.optimizer,
            overlaps=self.config.layout.overlap_param_gather,
        )
        built = build_optimizer(chunks, settings, self.config, groups)
        for part in self.parts(built):
            if isinstance(part, FlatPart):
                part.copy_at_once()
            for weight, main in part.main_parameters():
                if "matrix" in vars(weight):
                    vars(main)["matrix"] = vars(weight)["matrix"]
        return built

    def parts(self, optimizer: ChainedOptimizer) -> list[OptimizerPart]:
        kind = FlatPart if self.config.layout.sharding.optimizer else OptimizerPart
        return updating(optimizer, kind)

    @contextmanager
    def gathered(self, chunks: Sequence[Any]) -> Iterator[None]:
        """With --overlap-param-gather the optimizer's result is gathered during the next forward pass; whoever
        reads the weights in between (evaluation, saving) would see old ones."""
        if not self.config.layout.overlap_param_gather:
            yield
            return
        for chunk in chunks:
            chunk.disable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.enable_forward_pre_hook()
                _hook_modules_that_read(chunk)

    @contextmanager
    def averaged(self, optimizer: ChainedOptimizer, chunks: Sequence[Any]) -> Iterator[None]:
        """Gather the weights afterwards: the next forward pass gathers after an update alone, and would compute with
        the averages of other ranks' shards."""
        with super().averaged(optimizer, chunks):
            yield
        with self.gathered(chunks):
            pass

    @contextmanager
    def gathered_before_update(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Switch off the gathers that hooks begin: one begun here would count as the next step's gather, and the next
        step would compute with weights from before the update."""
        overlaps = self.config.layout.overlap_param_gather
        for chunk in chunks if overlaps else ():
            chunk.disable_forward_pre_hook(param_sync=False)
        try:
            yield
        finally:
            for chunk in chunks if overlaps else ():
                chunk.enable_forward_pre_hook()
                _hook_modules_that_read(chunk)

    def reduced_gradients(self, chunk: Any) -> Reduced:
        """Fetch the other ranks' parts: with the distributed optimizer each rank's buffer is reduced only in its own
        shard."""
        groups = [(bucket_group, chunk.intra_dp_cp_group) for bucket_group in chunk.bucket_groups]
        groups += [(bucket_group, chunk.intra_expt_dp_group) for bucket_group in chunk.expert_parallel_bucket_groups]
        for bucket_group, group in groups:
            for bucket in bucket_group.buckets:
                reduced = bucket.grad_data
                if chunk.ddp_config.use_distributed_optimizer:
                    reduced = torch.empty_like(bucket.grad_data)
                    own = shard_buffer(bucket.grad_data, group.size())[group.rank()]
                    torch.distributed.all_gather_into_tensor(reduced, own.clone(), group=group)
                for parameter in bucket.params_list:
                    start, end = bucket.param_to_index[parameter]
                    yield parameter, reduced[start:end].view(parameter.shape)

    def watch(self, chunk: Any, watcher: Watcher) -> None:
        watcher.register(chunk)
        chunk.watchers.append(watcher)

    def holders_of_one_copy(
        self, optimizer: ChainedOptimizer, groups: ProcessGroupCollection
    ) -> tuple[ProcessGroup, ProcessGroup]:
        """Return the ranks that hold one copy together: whole experts are divided over other ranks than the rest."""
        return groups.mp, groups.tp_ep_pp

    def held_weights(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        yield from (parameter.detach() for parameter in chunk.parameters())
        yield from (buffer.param_data for buffer in _buffers(chunk))

    def held_gradients(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        yield from (parameter.grad for parameter in chunk.parameters())
        yield from (buffer.grad_data for buffer in _buffers(chunk))


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _hook_modules_that_read(chunk: Any) -> None:
    """Have every module wait for the weights that it reads. megatron-core has each wait for the weights that it holds
    itself: half of them hold nothing, and the output layer of tied embeddings is given their weight.

    The handles stay, for megatron-core removes them all.
    """
    handles = chunk.remove_forward_pre_hook_handles
    for module, handle in handles.items():
        if isinstance(module, OutputLayer) and module.weight is None:
            handle.remove()
            hook: Any = partial(_wait_for_given, chunk.param_to_bucket_group)
            handles[module] = module.register_forward_pre_hook(hook, with_kwargs=True)
        elif next(module.parameters(recurse=False), None) is None:
            handle.remove()


def _wait_for_given(groups: Mapping[Any, Any], module: Any, _inputs: object, given: Mapping[str, Any]) -> None:
    for weight in (*module.parameters(recurse=False), given["weight"]):
        groups[weight].finish_param_sync()
