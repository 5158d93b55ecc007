"""Whole tensors by global parameter name, from the shards that the ranks of any layout hold.

On the ranks, `weights(run)` and `gradients(run)` return this rank's shards; in the parent, `assemble` puts those of
all ranks together, so that two layouts can be compared tensor by tensor.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.config.schema import Config
from megatron_ext.model.names import global_named_parameters
from megatron_ext.train.run import Run


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel rank's part of a named tensor, in fp32."""

    name: str
    tp_rank: int
    values: np.ndarray


def weights(run: Run) -> list[Shard]:
    """This rank's shards of the weights."""
    with run.gathered_parameters():
        return [_shard(run, name, parameter) for name, parameter in global_named_parameters(run.chunks)]


def gradients(run: Run) -> list[Shard]:
    """This rank's shards of the reduced gradients, before clipping. All data-parallel ranks must call it."""
    names = {id(parameter): name for name, parameter in global_named_parameters(run.chunks)}
    return [
        _shard(run, names[id(parameter)], gradient)
        for chunk in run.chunks
        for parameter, gradient in _reduced_gradients(chunk)
    ]


def _shard(run: Run, name: str, tensor: torch.Tensor) -> Shard:
    return Shard(name, run.groups.tp.rank(), tensor.detach().float().cpu().numpy().copy())


def _reduced_gradients(chunk: DistributedDataParallel) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """With the distributed optimizer each rank's buffer is reduced only in its own shard: fetch the others'."""
    for bucket_group in chunk.bucket_groups:
        for bucket in bucket_group.buckets:
            reduced = bucket.grad_data
            if chunk.ddp_config.use_distributed_optimizer:
                group = chunk.intra_dp_cp_group
                reduced = torch.empty_like(bucket.grad_data)
                own = shard_buffer(bucket.grad_data, group.size())[group.rank()]
                torch.distributed.all_gather_into_tensor(reduced, own.clone(), group=group)
            for parameter in bucket.params_list:
                start, end = bucket.param_to_index[parameter]
                yield parameter, reduced[start:end].view(parameter.shape)


def assemble(config: Config, shards: Iterable[Shard]) -> dict[str, np.ndarray]:
    """Whole tensors by name. Vocabulary padding is cut off, so that any two layouts have the same shapes.

    Raises:
        AssertionError: ranks that hold the same shard disagree on it, or a shard is missing.
    """
    by_name: dict[str, dict[int, np.ndarray]] = {}
    for shard in shards:
        seen = by_name.setdefault(shard.name, {}).setdefault(shard.tp_rank, shard.values)
        assert np.array_equal(seen, shard.values, equal_nan=True), f"replicas of {shard.name} differ"
    tensors = {}
    for parameter in parameters(config):
        parts = by_name.pop(parameter.name)
        tensors[parameter.name] = _join(parameter, [parts[rank] for rank in sorted(parts)])
    assert not by_name, f"not in the catalogue: {sorted(by_name)}"
    return tensors


def _join(parameter: Parameter, parts: list[np.ndarray]) -> np.ndarray:
    if parameter.tp_dim is None:
        assert all(np.array_equal(parts[0], part) for part in parts), f"{parameter.name} differs between TP ranks"
        whole = parts[0]
    else:
        # A stride of n: every shard is n pieces, and piece i of all ranks together is the i-th part of the whole.
        pieces = [np.split(part, parameter.tp_stride, axis=parameter.tp_dim) for part in parts]
        whole = np.concatenate(
            [piece[index] for index in range(parameter.tp_stride) for piece in pieces], axis=parameter.tp_dim
        )
    return whole[: parameter.true_rows] if parameter.true_rows is not None else whole
