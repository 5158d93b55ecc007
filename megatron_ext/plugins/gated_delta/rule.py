"""Computes the gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10) chunk by chunk.

    S_t = diag(exp(g_t)) S_{t-1}                      the state, a matrix [D, V], decays
    S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T        the value read at a key is moved towards v_t
    o_t = S_t^T q_t

Within a chunk all of its writes follow from one triangular system (the same, section 3.3); from chunk to chunk the
state alone is handed on. With one decay for all channels of a head this is Gated DeltaNet, with one for each channel of
the key Kimi Delta Attention (arXiv:2510.26692). In Kimi Delta Attention every two positions of a chunk have D decays
between them. The products of the positions of a chunk's second half with the positions of its first half are one matrix
product, of factors that decay from the middle on and of factors that decay up to it, none of which can overflow; each
half is divided likewise, down to one position.

Shapes: S positions, N chunks of C positions, D channels of a key, V of a value; ... are rows and heads that broadcast.

With --recurrence-kernels fla, fla-core's Triton kernels compute the same on a GPU. Their decays are logarithms to the
base e, as ours; queries, keys and values have the dtype of the model, decays, writes and states fp32. Documents lie one
after another in one row, each with a state of its own before it. Both passes take and give states and their gradients,
so that spans and context-parallel ranks go on from each other as with our own rule. Shapes for fla-core: P pieces of S
positions, B samples, G key heads, R value heads of each, D and V channels, N documents.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron_ext.plugins.gated_delta.describe import GatedDelta

CHUNK = 64
"""Positions of a chunk, a power of two."""


def delta_rule(
    query_SD: torch.Tensor | None,
    key_SD: torch.Tensor,
    value_SV: torch.Tensor,
    log_decay_SX: torch.Tensor,
    beta_S1: torch.Tensor | None,
    state_DV: torch.Tensor,
    documents_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the outputs o of equation 10, [..., S, V], or None without queries, and the state after the last position,
    [..., D, V].

    Args:
        query_SD: [..., S, D]; None where only the state is wanted.
        key_SD: [..., S, D].
        value_SV: [..., S, V].
        log_decay_SX: g, at most 0, [..., S, 1], or [..., S, D] with a decay for each channel.
        beta_S1: how far each write goes, [..., S, 1]; None: values are added as they are, whatever is read at their
            keys: S_t = exp(g_t) S_{t-1} + k_t v_t^T (Mamba-2, arXiv:2405.21060, equation 1).
        state_DV: the state before the first position, [..., D, V].
        documents_S: number of each position's document, [..., S], never falling; `state_DV` belongs to document 0.
    """
    length = key_SD.size(-2)
    by_channel = log_decay_SX.size(-1) > 1
    chunk = min(CHUNK, 1 << (length - 1).bit_length() if by_channel else length)  # halves have halves
    key, value, log_decay = (_chunks(x, chunk) for x in (key_SD, value_SV, log_decay_SX))
    # From before the chunk. In fp64: the gradient of a decay is a sum over pairs of positions, most of which cancel;
    # in fp32 A_log's gradient is off by 2e-5 of its norm, so by 1e-7.
    total = log_decay.double().cumsum(-2)
    closing = F.pad(total[..., -1:, :] - total[..., :-1, :], (0, 0, 0, 1)).to(key.dtype).exp()
    opened, kept = total.to(key.dtype).exp(), total[..., -1, :, None].to(key.dtype).exp()
    sees = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).tril()
    if documents_S is not None:
        ids_NC = _chunks(documents_S[..., None], chunk, repeats=True).squeeze(-1)
        before_N1 = F.pad(ids_NC[..., :-1, -1:], (0, 0, 1, 0))
        sees = sees & (ids_NC[..., :, None] == ids_NC[..., None, :])
        opened = opened * (ids_NC == before_N1)[..., None]
        closing = closing * (ids_NC == ids_NC[..., -1:])[..., None]
        kept = kept * (ids_NC[..., -1:] == before_N1)[..., None]
    query = None if query_SD is None else _chunks(query_SD, chunk)
    rows = [row for row in (None if beta_S1 is None else key, query) if row is not None]
    products = _products_by_channel if by_channel else _products
    found = products(rows, key, total, sees)
    writes, reads = value, None
    if beta_S1 is not None:
        # (I + system) writes = beta (values - what the state before the chunk has at the keys)
        beta = _chunks(beta_S1, chunk)
        system = beta * found[0]
        right = [x.expand(*system.shape[:-1], x.size(-1)) for x in (beta * value, beta * key * opened)]
        solved = torch.linalg.solve_triangular(system, torch.cat(right, dim=-1), upper=False, unitriangular=True)
        writes, reads = solved.split((value.size(-1), key.size(-1)), dim=-1)
    steps = [x.unbind(-3) for x in (writes, (key * closing).transpose(-1, -2), kept)]
    steps.append((None,) * len(steps[0]) if reads is None else reads.unbind(-3))
    outputs, state = [], state_DV
    if query is not None:
        steps += [x.unbind(-3) for x in (query * opened, found[-1])]
    for write, put, keep, read, *asked in zip(*steps, strict=True):
        moved = write if read is None else write - read @ state
        if asked:
            outputs.append(asked[0] @ state + asked[1] @ moved)
        state = keep * state + put @ moved
    return torch.cat(outputs, dim=-2)[..., :length, :] if outputs else None, state


def _chunks(x_SX: torch.Tensor, chunk: int, *, repeats: bool = False) -> torch.Tensor:
    """Return [..., S, X] as [..., N, C, X], filled up with zeros, or with the last position's."""
    missing = -x_SX.size(-2) % chunk
    if missing and repeats:
        x_SX = torch.cat((x_SX, x_SX[..., -1:, :].expand(*x_SX.shape[:-2], missing, -1)), dim=-2)
    elif missing:
        x_SX = F.pad(x_SX, (0, 0, 0, missing))
    return x_SX.unflatten(-2, (-1, chunk))


def _products(
    rows: Sequence[torch.Tensor], key_CD: torch.Tensor, total_C1: torch.Tensor, sees_CC: torch.Tensor
) -> list[torch.Tensor]:
    """Return, for each of `rows`, [..., C, D], its products with all keys of the chunk, each times the decay from the
    key's position to the row's, [..., C, C]; 0 where a position does not see the other."""
    itself = torch.eye(sees_CC.size(-1), dtype=torch.bool, device=sees_CC.device)
    differences = (total_C1 - total_C1.transpose(-1, -2)).to(key_CD.dtype)
    between = differences.masked_fill(~sees_CC, -torch.inf).masked_fill(itself, 0.0).exp()
    return [(row @ key_CD.transpose(-1, -2)) * between for row in rows]


def _products_by_channel(
    rows: Sequence[torch.Tensor], key_CD: torch.Tensor, total_CD: torch.Tensor, sees_CC: torch.Tensor
) -> list[torch.Tensor]:
    """Return the products of `_products` with a decay for each channel, computed from blocks of single positions up to
    the whole chunk."""
    found = [(row * key_CD).sum(-1).expand(total_CD.shape[:-1])[..., None, None] for row in rows]
    size = 1
    while size < sees_CC.size(-1):
        (first, second), (key, _) = _halves(total_CD, size), _halves(key_CD, size)
        middle = first[..., -1:, :]
        column = (key * (middle - first).to(key.dtype).exp()).transpose(-1, -2)
        decay = (second - middle).to(key.dtype).exp()
        for number, row in enumerate(rows):
            block = (_halves(row, size)[1] * decay) @ column
            upper, lower = found[number].unflatten(-3, (-1, 2)).unbind(-3)
            found[number] = torch.cat((F.pad(upper, (0, size)), torch.cat((block, lower), dim=-1)), dim=-2)
        size *= 2
    return [one.squeeze(-3) * sees_CC for one in found]


def _halves(x_CX: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Return every first and every second one of blocks of `size` positions, [..., C / (2 size), size, X]."""
    return x_CX.unflatten(-2, (-1, 2, size)).unbind(-3)


def rule_of(described: GatedDelta, dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor | None, torch.Tensor]]:
    """Return the function that computes the recurrence of a model of this dtype, with the arguments of `delta_rule`."""
    return delta_rule if described.kernels == "torch" else partial(_delta_rule_of_fla, dtype)


def _delta_rule_of_fla(
    dtype: torch.dtype,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Compute `delta_rule` with fla-core's kernels. Queries and keys are [P, B, G, 1, S, D], values [P, B, G, R, S, V],
    documents [P, B, 1, 1, S]."""
    samples, heads, (length, columns) = value.shape[:2], value.shape[2:4], value.shape[-2:]

    def laid_out(x: torch.Tensor, dtype: torch.dtype = state.dtype) -> torch.Tensor:
        """Return [P, B, G, R, S, X] as [P B, S, G R, X], with documents as [1, P B S, G R, X]."""
        x = x.to(dtype).flatten(2, 3).flatten(0, 1).transpose(1, 2)
        return x if documents is None else x.flatten(0, 1)[None]

    value, state = (F.pad(x, (0, columns % 2)) for x in (value, state))  # kernels need an even number of them
    asked = key if query is None else query
    if beta is None:  # the kernel has a query and a key for every value
        asked, key = (x.expand(-1, -1, -1, heads[1], -1, -1) for x in (asked, key))
    before, of_documents = state.flatten(2, 3).flatten(0, 1), {}
    if documents is not None:
        ids = documents.reshape(-1, length)
        begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).flatten().nonzero().squeeze(-1)
        before = before[begins // length] * (ids.flatten()[begins] == 0)[:, None, None, None]
        of_documents = {"cu_seqlens": F.pad(begins, (0, 1), value=ids.numel())}
    by_channel = log_decay.size(-1) > 1
    name = "simple_gla" if beta is None else "kda" if by_channel else "gated_delta_rule"
    kernel: Any = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    read, after = kernel(
        q=laid_out(asked, dtype),
        k=laid_out(key, dtype),
        v=laid_out(value, dtype),
        g=laid_out(log_decay) if by_channel else laid_out(log_decay).squeeze(-1),
        **({} if beta is None else {"beta": laid_out(beta).squeeze(-1)}),
        scale=1.0,
        initial_state=before,
        output_final_state=True,
        **of_documents,
    )
    if documents is not None:
        after = after[of_documents["cu_seqlens"][1:] % length == 0]
    after = after.view(state.shape)[..., :columns]
    if query is None:
        return None, after
    read = read.view(*samples, length, *heads, -1).permute(0, 1, 3, 4, 2, 5)
    return read[..., :columns].to(state.dtype), after
