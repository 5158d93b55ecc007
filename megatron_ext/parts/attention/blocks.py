"""Computes attention over one block of keys, with the log-sum-exp by which the results of several blocks are combined.

torch's scaled_dot_product_attention keeps the log-sum-exp of the scores to itself. With it, attention over some keys
and attention over others give attention over both, and each part's gradient can be computed by itself from the joint
result (Dao 2023, arXiv:2307.08691, section 3.1; Liu et al. 2023, arXiv:2310.01889). So the kernels under it are called
here by name, and next to them stands the same written out, for devices and types that have no such kernel.

Shapes: B batch, H query heads, G key/value heads (H is a multiple of G), Q queries, K keys, D channels of a head. A
causal block is square, and query i sees the keys up to i. Value heads may have another number of channels, V; torch's
kernels know one size alone, so that the smaller heads are then filled up with zeros, which change no result.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_CPU_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CUDA_TYPES = (torch.bfloat16, torch.float16)

_Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def block_forward(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask_QK: torch.Tensor | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale Q K^T) V over these keys alone, [B, H, Q, V], and the log-sum-exp of its scores, fp32 [B, H,
    Q].

    Args:
        mask_QK: additive mask of the scores, in the queries' type or fp32: -infinity for keys that a query does not
            see. It may be of heads, [B or 1, H or 1, Q, K].
        cap: bound of the scores before that, as cap tanh(scores / cap); no kernel has it.
    """
    channels = value_BGKD.size(-1)
    if channels != query_BHQD.size(-1):
        query, key, value = widened(query_BHQD, key_BGKD, value_BGKD)
        out, log_sum_exp = block_forward(query, key, value, causal=causal, scale=scale, mask_QK=mask_QK, cap=cap)
        return out[..., :channels], log_sum_exp
    tensors = query_BHQD, key_BGKD, value_BGKD
    if _has_cpu_kernel(query_BHQD) and cap is None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(*tensors, 0.0, causal, attn_mask=mask_QK, scale=scale)
    if _has_cuda_kernel(query_BHQD) and mask_QK is None and cap is None:
        out, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *tensors, 0.0, causal, False, scale=scale
        )
        return out, log_sum_exp
    return block_forward_reference(*tensors, causal=causal, scale=scale, mask_QK=mask_QK, cap=cap)


def block_backward(
    grad_BHQD: torch.Tensor,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    out_BHQD: torch.Tensor,
    log_sum_exp_BHQ: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask_QK: torch.Tensor | None = None,
    cap: float | None = None,
) -> _Blocks:
    """Return this block's share of the gradients of query, key and value.

    `out` and `log_sum_exp` belong to the whole attention: over all keys that the queries see, in this block or not.
    """
    tensors = grad_BHQD, query_BHQD, key_BGKD, value_BGKD, out_BHQD, log_sum_exp_BHQ
    if value_BGKD.size(-1) != query_BHQD.size(-1):
        grad, query, key, value, out = widened(*tensors[:-1])
        parts = block_backward(
            grad, query, key, value, out, log_sum_exp_BHQ, causal=causal, scale=scale, mask_QK=mask_QK, cap=cap
        )
        query, key, value = (part[..., : like.size(-1)] for part, like in zip(parts, tensors[1:4], strict=True))
        return query, key, value
    if _has_cpu_kernel(query_BHQD) and cap is None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(*tensors, 0.0, causal, attn_mask=mask_QK, scale=scale)
    if _has_cuda_kernel(query_BHQD) and mask_QK is None and cap is None:
        # Of the generator, which nothing reads without dropout; in the shapes and the type that the forward gives.
        seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=query_BHQD.device) for shape in ((2,), ()))
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(tensor.contiguous() for tensor in tensors),
            None,  # no cumulative lengths: what the forward gives, too
            None,
            query_BHQD.size(2),
            key_BGKD.size(2),
            0.0,
            causal,
            seed,
            offset,
            scale=scale,
        )
    return block_backward_reference(*tensors, causal=causal, scale=scale, mask_QK=mask_QK, cap=cap)


def block_forward_reference(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask_QK: torch.Tensor | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `block_forward` written out; it holds the scores of the block."""
    scores, _ = _scores(query_BHQD, key_BGKD, causal, scale, mask_QK, cap)
    log_sum_exp = scores.logsumexp(-1)
    weights = (scores - log_sum_exp.unsqueeze(-1)).exp().to(value_BGKD.dtype)
    return weights @ _repeated(value_BGKD, query_BHQD), log_sum_exp


def block_backward_reference(
    grad_BHQD: torch.Tensor,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    out_BHQD: torch.Tensor,
    log_sum_exp_BHQ: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask_QK: torch.Tensor | None = None,
    cap: float | None = None,
) -> _Blocks:
    """Compute `block_backward` written out (Dao et al. 2022, arXiv:2205.14135, appendix B.2)."""
    scores, of_cap = _scores(query_BHQD, key_BGKD, causal, scale, mask_QK, cap)
    weights = (scores - log_sum_exp_BHQ.unsqueeze(-1)).exp()
    grad, accurate = grad_BHQD.to(weights.dtype), weights.dtype
    for_value = weights.transpose(-1, -2) @ grad
    for_weights = grad @ _repeated(value_BGKD, query_BHQD).to(accurate).transpose(-1, -2)
    shift = (grad * out_BHQD.to(accurate)).sum(-1, keepdim=True)
    for_scores = weights * (for_weights - shift) * scale
    if of_cap is not None:
        for_scores = for_scores * (1.0 - of_cap.square())
    for_query = for_scores @ _repeated(key_BGKD, query_BHQD).to(accurate)
    for_key = for_scores.transpose(-1, -2) @ query_BHQD.to(accurate)
    groups = key_BGKD.size(1)
    return (
        for_query.to(query_BHQD.dtype),
        for_key.unflatten(1, (groups, -1)).sum(2).to(key_BGKD.dtype),
        for_value.unflatten(1, (groups, -1)).sum(2).to(value_BGKD.dtype),
    )


def has_varlen_kernel(query: torch.Tensor) -> bool:
    """Return whether `varlen_causal` has a kernel for tensors like this one."""
    return _has_cuda_kernel(query)


def varlen_causal(
    query_THD: torch.Tensor,
    key_UGD: torch.Tensor,
    value_UGD: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Compute causal attention within each of many sequences that lie end to end, in one kernel, on a GPU.

    Args:
        query_THD: [queries of all sequences, H, D].
        key_UGD, value_UGD: [keys of all sequences, G, D]. The last query of a sequence sees all of its keys, the one
            before it all but the last, and so on.
        query_ends, key_ends: int32 [sequences + 1], cumulative lengths from 0.
        longest: largest number of queries, and of keys, of any sequence.
        window: number of latest keys that a query sees; None: all.
    """
    from torch.nn.attention.varlen import varlen_attn

    channels = value_UGD.size(-1)
    query_THD, key_UGD, value_UGD = widened(query_THD, key_UGD, value_UGD)
    grouped: dict[str, Any] = {}
    if query_THD.size(1) != key_UGD.size(1):
        if _takes_grouped_heads(varlen_attn):
            grouped = {"enable_gqa": True}
        else:
            key_UGD, value_UGD = _repeated(key_UGD, query_THD), _repeated(value_UGD, query_THD)
    out = varlen_attn(
        query_THD,
        key_UGD,
        value_UGD,
        query_ends,
        key_ends,
        *longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, torch.Tensor)
    return out[..., :channels]


@functools.cache
def _takes_grouped_heads(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether torch's kernel takes fewer heads of keys than of queries: 2.15's does, 2.11's does not."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def widened(*heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with as many channels as the widest of them, by zeros at their end."""
    widest = max(tensor.size(-1) for tensor in heads)
    return tuple(
        tensor if tensor.size(-1) == widest else F.pad(tensor, (0, widest - tensor.size(-1))) for tensor in heads
    )


def _has_cpu_kernel(query: torch.Tensor) -> bool:
    return query.device.type == "cpu" and query.dtype in _CPU_TYPES


def _has_cuda_kernel(query: torch.Tensor) -> bool:
    channels = query.size(-1)
    return query.device.type == "cuda" and query.dtype in _CUDA_TYPES and channels % 8 == 0 and channels <= 256


def _scores(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    causal: bool,
    scale: float,
    mask_QK: torch.Tensor | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores, and with a cap the hyperbolic tangents that it multiplies."""
    accurate = torch.promote_types(query_BHQD.dtype, torch.float32)
    key = _repeated(key_BGKD, query_BHQD).to(accurate)
    scores, of_cap = query_BHQD.to(accurate) @ key.transpose(-1, -2) * scale, None
    if cap is not None:
        of_cap = (scores / cap).tanh_()
        scores = cap * of_cap
    if mask_QK is not None:
        scores = scores + mask_QK
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores, of_cap


def _repeated(heads_BGKD: torch.Tensor, query_BHQD: torch.Tensor) -> torch.Tensor:
    repeats = query_BHQD.size(1) // heads_BGKD.size(1)
    return heads_BGKD if repeats == 1 else heads_BGKD.repeat_interleave(repeats, 1)
