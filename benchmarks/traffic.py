"""Counts the bytes that a rank sends, where torch hands its collectives to a backend.

    with Traffic(run.groups) as traffic:
        trainer.step()
    traffic.sent          # {("reduce-scatter", "dp"): Sent(calls=1, bytes=1572864), ...}

Every collective of torch, whoever calls it (megatron-core, FSDP, functional or coalesced forms), is an operator of the
namespaces `c10d` or `_c10d_functional`, and a dispatch mode sees them all. What a rank sends is not measured at the
network but computed from the message, by the algorithm that moves least, on d ranks (Thakur et al. 2005):

    all-reduce                     2 (d-1)/d x tensor
    all-gather                       (d-1)/d x gathered tensor
    reduce-scatter                   (d-1)/d x tensor before it is scattered
    all-to-all                     what is meant for other ranks
    broadcast, reduce                (d-1)/d x tensor
    send                           tensor (a receive sends nothing)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

# Operator -> its name here, the argument that holds the full-sized tensor, and how often it travels, in (d-1)/d.
_OPERATORS = {
    "allreduce_": ("all-reduce", "tensors", 2.0),
    "allreduce_coalesced_": ("all-reduce", "tensors", 2.0),
    "all_reduce": ("all-reduce", "input", 2.0),
    "all_reduce_": ("all-reduce", "input", 2.0),
    "all_reduce_coalesced": ("all-reduce", "inputs", 2.0),
    "_allgather_base_": ("all-gather", "output_tensor", 1.0),
    "allgather_": ("all-gather", "output_tensors", 1.0),
    "allgather_into_tensor_coalesced_": ("all-gather", "outputs", 1.0),
    "_reduce_scatter_base_": ("reduce-scatter", "input_tensor", 1.0),
    "reduce_scatter_": ("reduce-scatter", "input_tensors", 1.0),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs", 1.0),
    "reduce_scatter_tensor": ("reduce-scatter", "input", 1.0),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs", 1.0),
    "broadcast_": ("broadcast", "tensors", 1.0),
    "broadcast": ("broadcast", "input", 1.0),
    "reduce_": ("reduce", "tensors", 1.0),
    "alltoall_": ("all-to-all", "input_tensors", 1.0),
    "alltoall_base_": ("all-to-all", "input", 1.0),
    "all_to_all_single": ("all-to-all", "input", 1.0),
}
# The functional gather names its own, small input: the gathered tensor is d times as large.
_GATHER_BY_INPUT = {"all_gather_into_tensor": "input", "all_gather_into_tensor_coalesced": "inputs"}
_SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}


@dataclass
class Sent:
    """Counts what one rank sent by one kind of collective in one kind of group."""

    calls: int = 0
    bytes: float = 0.0


class Traffic(TorchDispatchMode):
    """Counts inside its `with` block, on the threads of this rank's forward and backward passes."""

    def __init__(self, groups: ProcessGroupCollection | None = None):
        super().__init__()
        self.sent: dict[tuple[str, str], Sent] = {}
        """What was sent, by (collective, axis of the group)."""
        self._axes = _axes(groups) if groups is not None else {}

    @property
    def total(self) -> float:
        """Return the bytes sent by all collectives."""
        return sum(sent.bytes for sent in self.sent.values())

    def bytes(self, collective: str, *axes: str) -> float:
        """Return the bytes sent by one collective, on the given axes or on all."""
        found = ((kind, axis, sent) for (kind, axis), sent in self.sent.items())
        return sum(sent.bytes for kind, axis, sent in found if kind == collective and (not axes or axis in axes))

    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        operator = func._schema.name.split("::")[1]
        if operator in _SILENT:
            return
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        group = _group(values)
        ranks = dist.get_world_size(group)
        if operator == "send":
            kind, sent = "send", float(_bytes(values["tensors"]))
        elif operator in _GATHER_BY_INPUT:
            kind, sent = "all-gather", (ranks - 1.0) * _bytes(values[_GATHER_BY_INPUT[operator]])
        else:
            assert operator in _OPERATORS, f"{func}: a collective that nobody counts"
            kind, tensor, times = _OPERATORS[operator]
            share = _share_for_others(values, group) if kind == "all-to-all" else (ranks - 1) / ranks
            sent = times * share * _bytes(values[tensor])
        if ranks > 1:
            entry = self.sent.setdefault((kind, self._axes.get(_members(group), "other")), Sent())
            entry.calls += 1
            entry.bytes += sent


def _group(values: Mapping[str, Any]) -> dist.ProcessGroup:
    if "process_group" in values:
        return dist.ProcessGroup.unbox(values["process_group"])
    return dist.distributed_c10d._resolve_process_group(values["group_name"])  # pyright: ignore


def _share_for_others(values: Mapping[str, Any], group: dist.ProcessGroup) -> float:
    """Return of an all-to-all's rows the share that does not stay on this rank."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    splits = values.get("input_split_sizes") or []
    if not splits or not sum(splits):
        return (ranks - 1) / ranks
    return 1.0 - splits[rank] / sum(splits)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _axes(groups: ProcessGroupCollection) -> dict[tuple[int, ...], str]:
    """Return the ranks of a group -> its axis. Where axes have the same ranks, the one that divides most is named."""
    found: dict[tuple[int, ...], str] = {}
    for axis in (
        "tp",
        "cp",
        "pp",
        "ep",
        "dp",
        "dp_cp",
        "expt_dp",
        "tp_cp",
        "mp",
        "embd",
        "intra_dp_cp",
        "inter_dist_opt",
    ):
        group = getattr(groups, axis, None)
        if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0:
            found.setdefault(_members(group), axis)
    return found
