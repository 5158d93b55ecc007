"""Computes the recurrence of `rule.py` by fla-core's Triton kernels, on a GPU (--recurrence-kernels fla).

fla-core's decays are logarithms to the base e, as ours; queries, keys and values have the dtype of the model, decays,
writes and states fp32. Documents lie one after another in one row, each with a state of its own before it. Both passes
take and give states and their gradients, so that spans and context-parallel ranks go on from each other as with our
own rule.

Shapes: P pieces of S positions, B samples, G key heads, R value heads of each, D and V channels, N documents.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron_ext.parts.gated_delta.describe import GatedDelta
from megatron_ext.parts.gated_delta.rule import delta_rule


def rule_of(described: GatedDelta, dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor | None, torch.Tensor]]:
    """Return what computes the recurrence of a model of this dtype, with the arguments of `rule.delta_rule`."""
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
    """Return what `rule.delta_rule` returns. Queries and keys are [P, B, G, 1, S, D], values [P, B, G, R, S, V],
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
