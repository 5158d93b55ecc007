"""Begins a mixture of experts from a checkpoint of a dense model (--moe-use-upcycling).

Every expert is a copy of the dense MLP; with --moe-upcycling-granularity G it is one of G pieces of it, G experts one
after another are the whole, and have the same row in the router. The router keeps its random weights. Weights of
experts are scaled as in megatron-core's `upcycling_utils` (He et al. 2024, arXiv:2410.07524), so that what all experts
of a token give together is about what the MLP gave: with G 1 and weights of a token's experts that add up to 1 the
scale is 1, and the model the dense one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.checkpoint.native.checkpoint_state_dict import Contents
from megatron_ext.checkpoint.native.snapshot import Saveable
from megatron_ext.model.initialize import fill
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parallel.rows import row_shard
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.experts.describe import Experts
from megatron_ext.parts.stack import layers

_OF_ALL_EXPERTS, _OF_MLP = ".mlp.experts.experts.", ".mlp."
_ROUTER, _EXPERTS = ".mlp.router.", ".mlp.experts."


class Upcycling:
    """Reads a dense checkpoint into a model with experts.

    Args:
        contents: tensors to read into; experts' tensors are replaced by the MLP's, and routers' tensors, which the
            checkpoint does not have, are left out.
    """

    def __init__(self, run: Saveable, contents: Contents):
        self._run, self._kept = run, {}
        for chunk, tensors in contents.state_dict.items():
            if not isinstance(tensors, dict):
                continue
            for name, tensor in list(tensors.items()):
                if _ROUTER in name:
                    self._kept[chunk, name] = tensors.pop(name)
                elif _EXPERTS in name:
                    tensors[name] = self._of_mlp(tensor)

    def finish(self, loaded: dict[str, Any]) -> None:
        """Scale the weights that were read, and add the routers as they are."""
        granularity, mixture = self._run.config.checkpoint.moe_upcycling_granularity, _mixture(self._run)
        # The output of a token's experts is this many times less than the MLP's.
        pre_softmax = self._run.config.model.moe_router_pre_softmax
        less = mixture.count * granularity / mixture.top_k if pre_softmax else granularity
        degree = 3 if mixture.mlp.gated or mixture.mlp.activation == "squared_relu" else 2  # of its output, in weights
        scale = less ** (1 / degree)
        for chunk, tensors in loaded.items():
            for name in tensors if scale != 1.0 and chunk.startswith("model") else ():
                if _EXPERTS in name:
                    tensors[name] = dict_list_map_outplace(lambda tensor: tensor * scale, tensors[name])
        for (chunk, name), tensor in self._kept.items():
            loaded[chunk][name] = dict_list_map_outplace(lambda one: one.data, tensor)

    def _of_mlp(self, tensor: Any) -> Any:
        """Return the tensor into which to read a tensor of experts: each expert from its piece of the MLP's tensor."""
        if isinstance(tensor, ShardedTensorFactory):
            build = tensor.build_fn
            return replace(tensor, build_fn=lambda *given: dict_list_map_outplace(self._piece, build(*given)))
        return dict_list_map_outplace(self._piece, tensor)

    def _piece(self, part: ShardedTensor) -> ShardedTensor:
        granularity = self._run.config.checkpoint.moe_upcycling_granularity
        *before, _, rows, columns = part.global_shape
        *place, expert, row, column = part.global_offset
        piece = expert % granularity
        if "linear_fc1" in part.key:
            sections = 2 if _mixture(self._run).mlp.gated else 1
            each = rows // sections  # of one expert's gate, or of its up projection
            row = row // each * each * granularity + piece * each + row % each
            rows *= granularity
        else:
            column += piece * columns
            columns *= granularity
        shape = (*[1] * len(before), *part.local_shape[-2:])
        return replace(
            part,
            key=part.key.replace(_OF_ALL_EXPERTS, _OF_MLP),
            data=None if part.data is None else part.data.view(shape),
            local_shape=shape,
            global_shape=(*before, rows, columns),
            global_offset=(*place, row, column),
            axis_fragmentations=None,
            prepend_axis_num=0,
        )


def repeat_routers(run: Saveable) -> None:
    """Give the experts that are one MLP together the same rows in the router, of those that it began with."""
    granularity = run.config.checkpoint.moe_upcycling_granularity
    known = {parameter.name: parameter for parameter in parameters(run.config)}
    for name, weight in global_named_parameters(run.chunks) if granularity > 1 else ():
        if not name.endswith(".router.weight"):
            continue
        whole = torch.empty(known[name].shape)
        fill(whole, known[name], run.config.training.seed)
        whole = whole[: len(whole) // granularity].repeat_interleave(granularity, 0)
        rows = row_shard(weight)
        with torch.no_grad():
            (weight if rows is None else rows.local).copy_(whole if rows is None else whole[rows.first : rows.stop])


def is_of_a_dense_model(metadata: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has no router of experts."""
    return not any(_ROUTER in name for name in metadata)


def _mixture(run: Saveable) -> Experts:
    return next(layer.experts for layer in layers(run.config) if layer.experts is not None)
