"""Computes how fast a group of ranks exchanges data, from where its ranks are: inside a node, or in several.

Neighbouring ranks are in one node (config/derived/rank_order.py). A group of `size` ranks, `stride` apart, spans size x
stride ranks. Where a group spans several nodes, its ranks of a node use that node's network adapters together, one
adapter a device: collectives run in several rings, each of which crosses the border of nodes at another rank, so that k
ranks in a node give them k adapters. Context parallelism's ring of sends is a single one: at each border one rank
sends, through one adapter, and the others wait for it. An all-to-all and a pipeline's sends have their own adapter
each.

To the bytes over the bandwidth each collective adds the latency of its hops: a ring's (n-1), a sum's over a tree in
both directions, a send's and an all-to-all's one.
"""

import math

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.traffic import Term

_GIGA = 1e9


def seconds(term: Term, layout: LayoutConfig, machine: Machine) -> float:
    """Return the time that a rank's part of a purpose takes: bytes over bandwidth, and the latency of its calls.

    Between CPU ranks it is the processor that copies: those that share cores share that as well.
    """
    alone = transfer(term, layout, machine) + term.calls * latency(term, layout, machine)
    return alone / machine.processes_share(layout.world_size)


def transfer(term: Term, layout: LayoutConfig, machine: Machine) -> float:
    """Return the seconds at the bandwidth alone."""
    inside = machine.devices.intra_node_gb_s * _GIGA * machine.intra_share
    outside = machine.devices.inter_node_gb_s * _GIGA * machine.inter_share
    if term.axis == "pp":
        spanned = layout.model_parallel_size if layout.use_tp_pp_dp_mapping else layout.world_size
        return term.bytes / (inside if spanned <= machine.gpus_per_node else outside)
    stride, size = span(term.axis, layout)
    if stride * size <= machine.gpus_per_node:
        return term.bytes / inside
    in_a_node = max(machine.gpus_per_node // stride, 1)
    if term.collective == "all-to-all":
        leaving = (size - in_a_node) / (size - 1)
        return term.bytes * leaving / outside
    if term.collective == "send":
        return term.bytes / min(inside, outside)
    return term.bytes / min(inside, in_a_node * outside)


def latency(term: Term, layout: LayoutConfig, machine: Machine) -> float:
    """Return the seconds that one call waits for its hops."""
    constants = machine.constants
    if term.axis == "pp":
        return constants.hop if layout.world_size > machine.gpus_per_node else constants.hop_inside
    stride, size = span(term.axis, layout)
    nodes = math.ceil(stride * size / machine.gpus_per_node)
    in_a_node = math.ceil(size / nodes)
    if term.collective in ("send", "all-to-all"):
        return constants.hop if nodes > 1 else constants.hop_inside
    if term.collective == "all-reduce":
        return 2 * ((in_a_node - 1) * constants.hop_inside + math.ceil(math.log2(nodes)) * constants.hop)
    return (size - nodes) * constants.hop_inside / max(nodes, 1) + (nodes - 1) * constants.hop


def span(axis: str, layout: LayoutConfig) -> tuple[int, int]:
    """Return how far apart the ranks of a group are, and how many there are."""
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    if axis == "tp":
        return 1, tensor
    if axis == "cp":
        return tensor, context
    experts = layout.expert_tensor_size * layout.expert_model_parallel_size
    copies = layout.num_distributed_optimizer_instances
    sharers = context * layout.data_parallel_size
    if layout.use_tp_pp_dp_mapping and axis in ("dp", "between", "edp"):
        # The stages lie between data-parallel ranks.
        tensor, experts = (size * layout.pipeline_model_parallel_size for size in (tensor, experts))
    return {
        "dp": (tensor, sharers // copies),
        "between": (tensor * sharers // copies, copies),
        "ep": (1, experts),
        "edp": (experts, layout.expert_data_parallel_size // copies),
    }[axis]
