"""Computes routed experts in few bits: forward product, input gradient and weight gradient of groups of rows.

The rows of an expert on a rank come from as many microbatches as expert-parallel ranks send to it. Each group, the rows
of one expert and one microbatch, is rounded by itself, as a matrix of its own: no scale, whether of a tensor, a row of
the weight gradient or a block, is for rows of two experts or of two microbatches. The weight gradient adds up the
products of the groups, as without expert parallelism the data-parallel ranks add up theirs. So every layout rounds the
same numbers by the same scales, in every recipe. Groups are padded with rows of zeros to whole blocks, which change
neither a scale nor a sum.

Shapes: T (token, expert) pairs on this rank, sorted by expert; E local experts; I and O inputs and outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.distributed import get_process_group_ranks

from megatron_ext.config.derived.rank_order import coordinates, expert_coordinates
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.plugins.low_precision.linear import Multiplication, adds_fast, turned
from megatron_ext.plugins.low_precision.products import products
from megatron_ext.plugins.low_precision.quantize import quantize


@dataclass(frozen=True)
class Groups:
    """Where the rows of each expert and microbatch are among the rows of a rank."""

    experts: Sequence[int]
    """Local expert of each group; groups without rows are left out."""

    rows: Sequence[torch.Tensor]
    """Indices of the rows of each group, in the order of its tokens."""

    @classmethod
    def of(cls, rows_SE: Sequence[Sequence[int]], senders: Sequence[tuple[int, ...]], device: torch.device) -> "Groups":
        """Return the groups of rows that are sorted by expert, and for each expert by sender.

        Args:
            rows_SE: rows that each sender has for each local expert.
            senders: the microbatch of each sender, and places in it by which its tokens are ordered.
        """
        experts, rows, begin = [], [], 0
        for expert, counts in enumerate(zip(*rows_SE, strict=True)):
            parts: dict[int, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
            for sender, count in zip(senders, counts, strict=True):
                index = torch.arange(begin, begin + count, device=device)
                parts.setdefault(sender[0], []).append((sender[1:], index))
                begin += count
            for _, own in sorted(parts.items()):
                index = torch.cat([index for _, index in sorted(own, key=lambda part: part[0])])
                if len(index):
                    experts.append(expert)
                    rows.append(index)
        return cls(experts, rows)

    def split(self, x_TC: torch.Tensor, multiple: int) -> list[torch.Tensor]:
        """Return the rows of each group, and zeros up to a multiple."""
        parts = (x_TC.index_select(0, index) for index in self.rows)
        return [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % multiple)) for part in parts]

    def joined(self, parts: Sequence[torch.Tensor], out_TC: torch.Tensor) -> torch.Tensor:
        """Write the rows of each group to their places, and return them all."""
        for index, part in zip(self.rows, parts, strict=True):
            out_TC.index_copy_(0, index, part[: len(index)])
        return out_TC


def senders_of(dispatcher: Any, layout: LayoutConfig) -> list[tuple[int, ...]]:
    """Return the data-parallel rank of each sender, in the order in which the dispatcher puts their rows, with its
    context- and tensor-parallel ranks."""
    ranks = get_process_group_ranks(dispatcher.tp_ep_group)
    if hasattr(dispatcher, "input_splits"):  # all to all: experts' tensor-parallel ranks come one after another
        ranks = sorted(ranks, key=lambda rank: expert_coordinates(layout, rank)[:2])
    places = (coordinates(layout, rank) for rank in ranks)
    return [(place.dp, place.cp, place.tp) for place in places]


def rows_by_sender(dispatcher: Any) -> list[list[int]]:
    """Return the rows that each sender has for each local expert, after the dispatcher has sent them."""
    local, senders = dispatcher.num_local_experts, dispatcher.tp_ep_group.size()
    if not hasattr(dispatcher, "input_splits"):
        return dispatcher.local_map.view(senders, -1, local).sum(1).tolist()
    if local > 1 or dispatcher.drop_and_pad:
        return dispatcher.num_global_tokens_per_local_expert.view(senders, local).tolist()
    # The engine keeps no such numbers for one expert.
    sent_E = dispatcher.routing_map.sum(dim=0).long()
    if senders > 1:
        sent_E = gather_from_sequence_parallel_region(sent_E, group=dispatcher.tp_ep_group)
    sent = sent_E.view(dispatcher.ep_size, dispatcher.tp_size, -1).transpose(0, 1)
    return sent[:, :, dispatcher.local_expert_indices].reshape(senders, local).tolist()


def trained_product(
    dispatcher: Any,
    layout: LayoutConfig,
    how: Sequence[Multiplication],
    x_TI: torch.Tensor,
    weight_EOI: torch.Tensor,
    _tokens_per_expert: torch.Tensor,
) -> torch.Tensor:
    """Return rows of x times the transposed matrix of their expert, [T, O], differentiable.

    Args:
        how: settings of each local expert.
    """
    groups = Groups.of(rows_by_sender(dispatcher), senders_of(dispatcher, layout), x_TI.device)
    return linear_by_group(x_TI, weight_EOI, groups, how)


def linear_by_group(
    x_TI: torch.Tensor, weight_EOI: torch.Tensor, groups: Groups, how: Sequence[Multiplication]
) -> torch.Tensor:
    """Return rows of x times the transposed matrix of their group's expert, [T, O], differentiable."""
    return _uncompiled(x_TI, weight_EOI, groups, how)


class _ByGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: torch.Tensor, weight_EOI: torch.Tensor, groups: Groups, how: Sequence[Multiplication]
    ) -> torch.Tensor:
        ctx.save_for_backward(x_TI, weight_EOI)
        ctx.groups, ctx.how = groups, how
        of_x, of_weight = how[0].recipe.forward
        parts = groups.split(x_TI, how[0].recipe.multiple)
        lefts = [quantize(part, of_x, cut=how[0].of_inputs) for part in parts]
        weights = [one.rounded(weight) for one, weight in zip(how, weight_EOI, strict=True)]
        found = products(lefts, [weights[e] for e in groups.experts], x_TI.dtype, fast_sums=adds_fast(of_weight))
        return groups.joined(found, x_TI.new_zeros(len(x_TI), weight_EOI.size(1)))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_TO: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x_TI, weight_EOI = ctx.saved_tensors
        groups, how = ctx.groups, ctx.how
        recipe, cuts = how[0].recipe, how[0]
        of_grad, (of_turned, of_x) = recipe.input_gradient.left, recipe.weight_gradient
        drawn = partial(zip, [how[expert].draw for expert in groups.experts], strict=True)
        grads = groups.split(grad_TO, recipe.multiple)
        for_x, for_weight = None, None
        if ctx.needs_input_grad[0]:
            weights = [one.turned(weight) for one, weight in zip(how, weight_EOI, strict=True)]
            lefts = [quantize(grad, of_grad, cut=cuts.of_gradients, draw=one) for one, grad in drawn(grads)]
            found = products(lefts, [weights[e] for e in groups.experts], x_TI.dtype)
            for_x = groups.joined(found, torch.zeros_like(x_TI))
        if ctx.needs_input_grad[1]:
            parts = groups.split(x_TI, recipe.multiple)
            lefts = [turned(grad, of_turned, cuts.of_gradients, draw=one) for one, grad in drawn(grads)]
            rights = [turned(part, of_x, cuts.of_inputs, draw=one) for one, part in drawn(parts)]
            sums = torch.zeros(weight_EOI.shape, dtype=torch.float32, device=x_TI.device)
            for expert, part in zip(groups.experts, products(lefts, rights, torch.float32, by_sum=True), strict=True):
                sums[expert] += part
            for_weight = sums.to(weight_EOI.dtype)
        return for_x, for_weight, None, None


_uncompiled: Any = torch.compiler.disable(_ByGroup.apply)
