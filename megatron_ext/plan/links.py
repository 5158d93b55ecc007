"""Computes how fast a group of ranks exchanges data, from where its ranks are: inside a node, or in several.

Neighbouring ranks are in one node (the rank order of config/ranks.py). A group of `size` ranks, `stride` apart, spans
size x stride ranks. Beyond a node, its ranks there use their node's network adapters together, one adapter a device:
a ring's traffic crosses each border of nodes once, so that k ranks in a node give it k adapters. An all-to-all and a
pipeline's sends have their own adapter each.
"""

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.plan.hardware import Machine
from megatron_ext.plan.traffic import Term

_GIGA = 1e9


def seconds(term: Term, layout: LayoutConfig, machine: Machine) -> float:
    """Return the time that a rank's part of a collective takes at the bandwidth alone, without latency."""
    rate = _GIGA * machine.link_efficiency
    inside, outside = machine.devices.intra_node_gb_s * rate, machine.devices.inter_node_gb_s * rate
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
    return term.bytes / min(inside, in_a_node * outside)


def span(axis: str, layout: LayoutConfig) -> tuple[int, int]:
    """Return how far apart the ranks of a group are, and how many there are."""
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    experts = layout.expert_tensor_size * layout.expert_model_parallel_size
    copies = layout.num_distributed_optimizer_instances
    sharers = context * layout.data_parallel_size
    if layout.use_tp_pp_dp_mapping and axis in ("dp", "between", "edp"):
        # The stages lie between data-parallel ranks.
        tensor, experts = (size * layout.pipeline_model_parallel_size for size in (tensor, experts))
    return {
        "tp": (1, tensor),
        "cp": (tensor, context),
        "dp": (tensor, sharers // copies),
        "between": (tensor * sharers // copies, copies),
        "ep": (1, experts),
        "edp": (experts, layout.expert_data_parallel_size // copies),
    }[axis]
