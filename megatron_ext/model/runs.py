"""Causal attention over runs: stretches of consecutive queries that each see one stretch of keys, and no others.

A document in a packed sample is a run; so is the part of a document, or of a whole sample, that one context-parallel
rank holds. No mask is made: a run is at most a square causal block and a full block before it, and attention over two
blocks is put together from their log-sum-exps (Dao 2023, arXiv:2307.08691, section 3.1.1).

Shapes: B batch, H query heads, G key/value heads, Q queries, K keys, D channels of a query or key head, V channels of a
value head.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_ext.data.packing import Run
from megatron_ext.device.attention_kernels import block_backward, block_forward


def attend_runs(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKV: torch.Tensor, runs: Sequence[Run], scale: float
) -> torch.Tensor:
    """Attention of each run's queries over its keys, [B, H, Q, V]; contiguous.

    Args:
        runs: cover every query once. The last query of a run sees all keys of the run, the one before it all but the
            last, and so on. Every row of the batch has the same runs.
    """
    return _Runs.apply(query_BHQD, key_BGKD, value_BGKV, tuple(runs), scale)  # pyright: ignore[reportReturnType]


def attend_runs_reference(
    query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKV: torch.Tensor, runs: Sequence[Run], scale: float
) -> torch.Tensor:
    """`attend_runs` written out with one mask over all queries and keys."""
    queries, keys = query_BHQD.size(2), key_BGKD.size(2)
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for run in runs:
        rows, columns = run.rows, slice(run.first_key, run.first_key + run.keys)
        visible[rows, columns] = torch.ones(run.queries, run.keys, dtype=torch.bool).tril(run.keys - run.queries)
    repeats = query_BHQD.size(1) // key_BGKD.size(1)
    key, value = key_BGKD.repeat_interleave(repeats, 1), value_BGKV.repeat_interleave(repeats, 1)
    scores = (query_BHQD @ key.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value


def merge(
    out: torch.Tensor, log_sum_exp: torch.Tensor, other: torch.Tensor, other_log_sum_exp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of two blocks, from the attention over each.

    Args:
        out, other: [..., Q, V]; the result has the wider of their types.
        log_sum_exp, other_log_sum_exp: [..., Q].
    """
    joint = torch.logaddexp(log_sum_exp, other_log_sum_exp)
    share = (log_sum_exp - joint).exp().unsqueeze(-1)
    other_share = (other_log_sum_exp - joint).exp().unsqueeze(-1)
    return out * share + other * other_share, joint


def _blocks(run: Run) -> Iterator[tuple[slice, bool]]:
    """The keys of a run in blocks, and whether a block is causal (and square) or full."""
    if run.keys > run.queries:
        yield slice(run.first_key, run.first_key + run.keys - run.queries), False
    yield slice(run.first_key + run.keys - run.queries, run.first_key + run.keys), True


class _Runs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: tuple[Run, ...], scale: float
    ) -> torch.Tensor:
        out = query.new_empty((*query.shape[:-1], value.size(-1)))
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for run in runs:
            parts = [
                block_forward(query[:, :, run.rows], key[:, :, block], value[:, :, block], causal=causal, scale=scale)
                for block, causal in _blocks(run)
            ]
            joint = parts[0] if len(parts) == 1 else merge(*parts[0], *parts[1])
            out[:, :, run.rows], log_sum_exp[:, :, run.rows] = joint
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, out, log_sum_exp = ctx.saved_tensors
        for_query, for_key, for_value = (
            tensor.new_zeros(tensor.shape, dtype=log_sum_exp.dtype) for tensor in (query, key, value)
        )
        for run in ctx.runs:
            rows = run.rows
            for block, causal in _blocks(run):
                parts = block_backward(
                    grad[:, :, rows],
                    query[:, :, rows],
                    key[:, :, block],
                    value[:, :, block],
                    out[:, :, rows],
                    log_sum_exp[:, :, rows].contiguous(),
                    causal=causal,
                    scale=ctx.scale,
                )
                for_query[:, :, rows] += parts[0]
                for_key[:, :, block] += parts[1]
                for_value[:, :, block] += parts[2]
        return for_query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype), None, None
