"""A mode of training in which weights are NaN for as long as a gather has yet to bring them.

    poisoned(sharding_of(config))       # a scheme, before it shards

A scheme that gathers weights while a forward pass runs leaves old values where they will come, or none. Who reads a
weight before the gather has been waited for trains with these in silence, or with the right ones where the network was
faster. Here every such reader gets NaN, whatever the network does.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch, wraps
from typing import Any

import torch

from megatron_ext.sharding.fsdp2 import TorchFSDP
from megatron_ext.sharding.megatron_fsdp import MegatronFSDPChunk
from megatron_ext.sharding.scheme import Sharding
from megatron_ext.sharding.written_gradients import WritingDataParallel


def poisoned(scheme: Sharding) -> Sharding:
    """Return the scheme, whose chunks hold NaN in place of weights that are gathered later: after an update, and
    wherever a pass frees the weights that it has gathered."""
    shard, finish_update = scheme.shard, scheme.finish_update
    poisons: list[Callable[[], None]] = []

    def shard_and_poison(*arguments: Any) -> Sequence[Any]:
        chunks = shard(*arguments)
        poisons.extend(map(_poison_of, chunks))
        return chunks

    def finish_update_and_poison(optimizer: Any) -> None:
        finish_update(optimizer)
        for poison in poisons:
            poison()

    own: Any = scheme
    own.shard, own.finish_update = shard_and_poison, finish_update_and_poison
    return scheme


@singledispatch
def _poison_of(chunk: Any) -> Callable[[], None]:
    """Return a function that overwrites with NaN the weights of `chunk` that are gathered before their next use."""
    raise AssertionError(f"{type(chunk).__name__}: what does it gather?")


@_poison_of.register
def _of_buckets(chunk: WritingDataParallel) -> Callable[[], None]:
    """Under the distributed optimizer, parameters leave their buffer until `finish_param_sync` has waited for it, or a
    gather that is waited for at once is done."""
    groups: list[Any] = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    if not chunk.ddp_config.overlap_param_gather:
        return lambda: None

    def reveal(group: Any) -> None:
        for bucket in group.buckets:
            for weight, (start, end) in bucket.param_to_index.items():
                weight.data = bucket.param_data[start:end].view(weight.shape)

    def revealing(group: Any, method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)
        def gather(*arguments: Any, **options: Any) -> None:
            method(*arguments, **options)
            if group.param_gather_handle is None:
                reveal(group)

        return gather

    for group in groups:
        group.start_param_sync = revealing(group, group.start_param_sync)
        group.finish_param_sync = revealing(group, group.finish_param_sync)
    return lambda: _of_each(_hide, [bucket.params_list for group in groups for bucket in group.buckets])


@_poison_of.register
def _of_units(chunk: TorchFSDP) -> Callable[[], None]:
    """Under FSDP2, the memory that a weight is gathered into is NaN instead of freed."""
    weights: list[torch.Tensor] = []

    def fill(*_of_module: Any) -> None:
        for weight in weights:
            storage = weight.untyped_storage()
            if storage.size() == 0:
                storage.resize_(weight.numel() * weight.element_size())
                weight.data.fill_(torch.nan)  # autograd does not notice

    def fill_all() -> None:
        for weight in weights:
            weight.untyped_storage().resize_(0)
        fill()

    chunk.when_gathered(lambda _divided, weight: weights.append(weight))
    for unit in chunk.units:
        unit.register_forward_pre_hook(fill)
        unit.register_forward_hook(fill)
    return fill_all


@_poison_of.register
def _of_pipeline(chunk: MegatronFSDPChunk) -> Callable[[], None]:
    """Under Megatron-FSDP, parameters leave their bucket when it is freed, until its gather has been waited for."""
    if chunk.strategy == "no_shard":
        return lambda: None
    fsdp: Any = chunk.module
    pipeline, groups = fsdp.all_gather_pipeline, fsdp.param_and_grad_buffer.parameter_groups

    def is_ready(bucket: int) -> bool:
        return pipeline.bucket_status[pipeline.get_bucket_key(bucket, False)].name == "READY_TO_USE"

    def hide(bucket: int) -> None:
        if not is_ready(bucket):
            _hide(groups[bucket].params)

    def hiding(method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)
        def change(bucket_id: int, bwd: bool, **options: Any) -> None:
            method(bucket_id, bwd, **options)
            hide(bucket_id)

        return change

    wait = pipeline.wait_bucket_ready

    @wraps(wait)
    def wait_and_reveal(bucket_id: int, bwd: bool, **options: Any) -> None:
        wait(bucket_id, bwd, **options)
        if is_ready(bucket_id):
            pipeline.get_fsdp_buffer(bucket_id).fetch_bucket(set_param_data=True)

    pipeline.wait_bucket_ready = wait_and_reveal
    pipeline.async_bucket_gather = hiding(pipeline.async_bucket_gather)
    pipeline.release_bucket = hiding(pipeline.release_bucket)
    return lambda: _of_each(hide, range(len(groups)))


def _of_each(act: Callable[[Any], None], those: Iterable[Any]) -> None:
    for one in those:
        act(one)


def _hide(weights: Sequence[Any]) -> None:
    for weight in weights:
        weight.data = torch.full_like(weight.data, torch.nan)
