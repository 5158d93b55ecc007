"""Computes the gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10) chunk by chunk.

    S_t = diag(exp(g_t)) S_{t-1}                      what is kept of the state, a matrix [D, V]
    S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T        what is read at a key is moved towards its value
    o_t = S_t^T q_t

Within a chunk all of its writes follow from one triangular system (the same, section 3.3); from chunk to chunk the
state alone is handed on. With one decay for all channels of a head this is Gated DeltaNet, with one for each channel of
the key Kimi Delta Attention (arXiv:2510.26692). There every two positions of a chunk have D decays between them. The
products of positions of a chunk's second half with those of its first are one matrix product, of what decays from the
middle on and of what decays up to it, none of which can overflow; each half is divided likewise, down to one position.

Shapes: S positions, N chunks of C positions, D channels of a key, V of a value; ... are rows and heads that broadcast.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

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
    """Return what each query reads, [..., S, V], and the state after the last position, [..., D, V].

    Args:
        query_SD: [..., S, D]; None where nothing is read.
        key_SD: [..., S, D].
        value_SV: [..., S, V].
        log_decay_SX: g, at most 0, [..., S, 1], or [..., S, D] with a decay for each channel.
        beta_S1: how far each write goes, [..., S, 1]; None: values are added as they are, whatever is read at their
            keys: S_t = exp(g_t) S_{t-1} + k_t v_t^T (Mamba-2, arXiv:2405.21060, equation 1).
        state_DV: the state before the first position, [..., D, V].
        documents_S: number of each position's document, [..., S], never falling; 0 is what `state_DV` belongs to.
    """
    length = key_SD.size(-2)
    by_channel = log_decay_SX.size(-1) > 1
    chunk = min(CHUNK, 1 << (length - 1).bit_length() if by_channel else length)  # halves have halves
    key, value, log_decay = (_chunks(x, chunk) for x in (key_SD, value_SV, log_decay_SX))
    # From before the chunk. In fp64: the gradient of a decay is a sum over pairs of positions, most of which cancel;
    # in fp32 that of A_log is off by 2e-5 of its norm, so by 1e-7.
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
    """Return the products of each of `rows`, [..., C, D], at every position with the key at every other one, times what
    is left there of what was written here, [..., C, C]; 0 where a position does not see the other."""
    itself = torch.eye(sees_CC.size(-1), dtype=torch.bool, device=sees_CC.device)
    differences = (total_C1 - total_C1.transpose(-1, -2)).to(key_CD.dtype)
    between = differences.masked_fill(~sees_CC, -torch.inf).masked_fill(itself, 0.0).exp()
    return [(row @ key_CD.transpose(-1, -2)) * between for row in rows]


def _products_by_channel(
    rows: Sequence[torch.Tensor], key_CD: torch.Tensor, total_CD: torch.Tensor, sees_CC: torch.Tensor
) -> list[torch.Tensor]:
    """Return the same with a decay for each channel, from blocks of single positions on to the whole chunk."""
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
