"""How fast a group of ranks exchanges data, from where its ranks are: inside a node, or in several.

Neighbouring ranks are in one node (the rank order of config/layout.py). A group of `size` ranks, `stride` apart, spans
size x stride ranks. Beyond a node, its ranks there use their node's network adapters together, one adapter a device:
a ring's traffic crosses each border of nodes once, so that k ranks in a node give it k adapters. An all-to-all and a
pipeline's sends have their own adapter each.
"""

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.plan.hardware import Hardware
from megatron_ext.plan.traffic import Term

_GIGA = 1e9


def seconds(term: Term, layout: LayoutConfig, devices: Hardware, gpus_per_node: int) -> float:
    """Time that a rank's part of a collective takes at the bandwidth alone, without latency."""
    if term.axis == "pp":
        inside = layout.world_size <= gpus_per_node
        return term.bytes / _GIGA / (devices.intra_node_gb_s if inside else devices.inter_node_gb_s)
    stride, size = span(term.axis, layout)
    if stride * size <= gpus_per_node:
        return term.bytes / _GIGA / devices.intra_node_gb_s
    in_a_node = max(gpus_per_node // stride, 1)
    if term.collective == "all-to-all":
        leaving = (size - in_a_node) / (size - 1)
        return term.bytes / _GIGA * leaving / devices.inter_node_gb_s
    return term.bytes / _GIGA / min(devices.intra_node_gb_s, in_a_node * devices.inter_node_gb_s)


def span(axis: str, layout: LayoutConfig) -> tuple[int, int]:
    """How far apart the ranks of a group are, and how many there are."""
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    experts = layout.expert_tensor_size * layout.expert_model_parallel_size
    copies = layout.num_distributed_optimizer_instances
    sharers = context * layout.data_parallel_size
    return {
        "tp": (1, tensor),
        "cp": (tensor, context),
        "dp": (tensor, sharers // copies),
        "between": (tensor * sharers // copies, copies),
        "ep": (1, experts),
        "edp": (experts, layout.expert_data_parallel_size),
    }[axis]
