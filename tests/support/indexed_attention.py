"""DeepSeek sparse attention written out (arXiv:2512.02556, equations 1 to 4), by one mask over all queries and keys."""

from typing import Any

import torch


def written_out(
    layer: Any, hidden: torch.Tensor, table: torch.Tensor | None, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output and the indexer's loss, the sum over queries times its weight.

    Args:
        layer: attention with an indexer, on one rank.
        hidden: [S, B, hidden].
        table: of angles.
        visible: bool [B or 1, S, S], which keys a query may choose from.
    """
    described, core = layer.described.indexer, layer.core_attention
    query, latent, shared, of_query, of_key, weights = layer._projected(hidden, table)
    key, value = layer._keys_and_values(latent, shared)
    scores = torch.einsum("bqie,bte,bqi->bqit", of_query, of_key, torch.ones_like(weights)).relu()
    scores = (scores * weights[..., None]).sum(2).masked_fill(~visible, -torch.inf)
    best = scores.topk(described.topk, dim=-1).indices
    chosen = torch.zeros_like(visible.expand(scores.shape)).scatter(-1, best, True) & visible
    logits = query @ key.mT * core.scale
    seen = visible if described.warms_up else chosen
    out = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ value
    judged = chosen if described.learns_from_chosen and not described.warms_up else visible
    target = logits.detach().masked_fill(~judged[:, None], -torch.inf).softmax(-1).mean(1)
    predicted = scores.masked_fill(~judged, -torch.inf).log_softmax(-1).masked_fill(~judged, 0.0)
    loss = torch.nn.functional.kl_div(predicted, target, reduction="sum")
    return layer.linear_proj(out.permute(2, 0, 1, 3).flatten(2))[0], described.loss * loss
