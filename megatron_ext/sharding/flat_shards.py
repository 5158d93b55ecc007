"""The state of megatron-core's distributed optimizer: each rank keeps a flat range of all weights one after another,
which cuts through weights anywhere. It is saved as whole weights, so that any layout can read it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed import ProcessGroup

from megatron_ext.device.many_tensors import copy_
from megatron_ext.parallel.rows import RowShard
from megatron_ext.sharding.parts import MASTER, Exchange, OptimizerPart, State


class FlatPart(OptimizerPart):
    """megatron-core's distributed optimizer over DDP's buffers."""

    divides_state = True
    core: DistributedOptimizer

    def main_parameters(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for parameter, (group, index) in self.core.model_param_group_index_map.items():
            yield parameter, self.core.optimizer.param_groups[group]["params"][index]

    def own(self, weight: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        own = self._range(weight)
        return values.view(-1)[own.start : own.end]

    def copy_at_once(self) -> None:
        """Have every later update copy gradients and weights all at once; the engine's methods copy one by one."""
        core: Any = self.core
        core._copy_model_grads_to_main_grads = self._take_gradients
        core._copy_main_params_to_model_params = self._give_weights

    def _take_gradients(self) -> None:
        """Give the updated shards their gradients in fp32, without a copy where they are summed in fp32."""
        given, taken = [], []
        for weight, main in self.main_parameters():
            summed: Any = vars(weight)["main_grad"]
            own = self.own(weight, summed)
            if own.dtype == torch.float32:
                main.grad = own
                continue
            main.grad = torch.empty_like(own, dtype=torch.float32)
            given.append(own)
            taken.append(main.grad)
        copy_(taken, given)

    def _give_weights(self) -> None:
        """Copy the updated shards into the weights, but for shards that lie in them."""
        pairs = [(self.own(weight, weight.detach()), main.detach()) for weight, main in self.main_parameters()]
        pairs = [(own, main) for own, main in pairs if own.data_ptr() != main.data_ptr()]
        copy_([own for own, _ in pairs], [main for _, main in pairs])

    def rows_to_read(self, weight: torch.nn.Parameter) -> list[RowShard]:
        """Return the rows that the flat range touches, which may begin and end within one.

        A row that ranks share is read by itself. Where ranks read together, the engine takes pieces that begin at one
        place for one and the same, and sends what one rank has read to the others.
        """
        first, stop = self._rows(weight)
        shared = {first + 1, stop - 1} if weight.dim() > 1 else set()
        ends = [first, *sorted(end for end in shared if first < end < stop), stop]
        return [_rows_of(weight, start, end) for start, end in pairwise(ends)]

    def to_read(self, weight: torch.nn.Parameter, state: State) -> State:
        first, stop = self._rows(weight)
        return {name: torch.empty((stop - first, *weight.shape[1:]), dtype=torch.float32) for name in state}

    def own_of_rows(self, weight: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
        own = self._range(weight)
        begin = self._rows(weight)[0] * _row_size(weight)
        return rows.view(-1)[own.start - begin : own.end - begin]

    def _range(self, weight: torch.nn.Parameter) -> Any:
        """Return the start and end of this rank's range of `weight`."""
        return self.core._get_model_param_range_map(weight)["param"]

    def _rows(self, weight: torch.nn.Parameter) -> tuple[int, int]:
        """Return the first row that the range touches, and the row after the last one."""
        own, size = self._range(weight), _row_size(weight)
        return own.start // size, -(-own.end // size)

    def to_save(
        self, states: Mapping[int, State], moments: Sequence[str], exchange: Exchange
    ) -> tuple[Mapping[int, State], int | None]:
        gathered = _gather(self.core, states, moments, exchange)
        return {id(weight): state for weight, state in gathered}, self.core.data_parallel_group.rank()


def _row_size(weight: torch.Tensor) -> int:
    return math.prod(weight.shape[1:])


def _rows_of(weight: torch.Tensor, first: int, stop: int) -> RowShard:
    """Return a place in `weight`, without values."""
    place = torch.empty((stop - first, *weight.shape[1:]), dtype=weight.dtype, device="meta")
    return RowShard(place, first, tuple(weight.shape), None)


def _gather(
    core: DistributedOptimizer, states: Mapping[int, State], moments: Sequence[str], exchange: Exchange
) -> Iterator[tuple[torch.nn.Parameter, State]]:
    """Return whole state of the weights that this rank writes, from the shards of all, bucket by bucket, in host
    memory.

    A weight is written by the rank whose shard holds its beginning, so that every rank writes about as much as its
    shard, and receives no more than the part of its last weight that lies on the ranks after it.
    """
    group = exchange.group_of(core.data_parallel_group)
    for buffer, ranges in zip(core.buffers, core.gbuf_ranges, strict=True):
        [bucket_ranges] = ranges.values()
        for bucket, bucket_range in zip(buffer.buckets, bucket_ranges, strict=True):
            places = [(*bucket.param_to_index[parameter], parameter) for parameter in bucket.params_list]
            places.sort(key=lambda place: place[0])
            size = bucket.grad_data.numel() // group.size()
            spans = _spans([(start, end) for start, end, _ in places], size, group.size())
            names = [*moments, *([MASTER] if buffer.param_dtype != torch.float32 else [])]
            whole = {}
            for name in names:
                shard = torch.zeros(size, dtype=torch.float32, device=exchange.device or bucket.grad_data.device)
                for parameter, parameter_range in bucket_range["param_map"].items():
                    place, own = parameter_range["gbuf_local"], states[id(parameter)]
                    if name in own:
                        shard[place.start : place.end] = own[name].reshape(-1)
                whole[name] = _exchange(shard, spans, group).cpu()
            first, last = spans[group.rank()]
            for start, end, parameter in places:
                if first <= start < last:
                    yield (
                        parameter,
                        {
                            name: flat[start - first : end - first].view(parameter.shape)
                            for name, flat in whole.items()
                            if name in states[id(parameter)]
                        },
                    )


def _spans(places: Sequence[tuple[int, int]], shard_size: int, ranks: int) -> list[tuple[int, int]]:
    """Return for every rank the start and end, in the bucket, of the weights that it writes."""
    spans = []
    for rank in range(ranks):
        own = [(start, end) for start, end in places if start // shard_size == rank]
        spans.append((own[0][0], own[-1][1]) if own else (0, 0))
    return spans


def _exchange(shard: torch.Tensor, spans: Sequence[tuple[int, int]], group: ProcessGroup) -> torch.Tensor:
    """Return this rank's span of the bucket, of which every rank has a shard. Collective."""

    def overlap(owner: int, rank: int) -> tuple[int, int]:
        """Return the overlap of the shard of `owner` with the span of `rank`, within the shard; the start is no more
        than the end."""
        begin, end = owner * shard.numel(), (owner + 1) * shard.numel()
        low, high = max(begin, spans[rank][0]), min(end, spans[rank][1])
        return (low - begin, high - begin) if low < high else (0, 0)

    rank, ranks = group.rank(), range(group.size())
    sent = [overlap(rank, other) for other in ranks]
    received = [high - low for low, high in (overlap(other, rank) for other in ranks)]
    span = shard.new_empty(sum(received))
    torch.distributed.all_to_all_single(
        span,
        torch.cat([shard[low:high] for low, high in sent]),
        received,
        [high - low for low, high in sent],
        group=group,
    )
    return span
