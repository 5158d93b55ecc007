"""Rescales the weights of queries and keys whose products have become too large, after each update (QK-clip, of
MuonClip: Kimi K2, arXiv:2507.20534, section 2.1, algorithm 1).

With the largest product S of a head in a step, over the global batch, and a threshold t, a head with S > t gets the
factor e = t / S: its queries are multiplied by e^alpha and its keys by e^(1-alpha). Heads that share keys share the
smallest e. With latent attention the key's rotated channels belong to all heads and stay; the query's rotated channels
are multiplied by e. It is megatron-core's rule (`clip_qk` of its attention), for weights that ranks divide in any way.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.parallel.rows import row_shard
from megatron_ext.parts.attention.compute import SDPAttention
from megatron_ext.parts.attention.query_key_factors import HasQueryKeyWeights, QueryKeyFactors


class LargestScores:
    """The largest product of a query and a key of every head of this rank in a step.

    Args:
        chunks: model chunks of this rank, the same layers on all ranks of `group`.
        group: the ranks that have the same weights and other tokens.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], group: ProcessGroup):
        modules = [module for chunk in chunks for module in chunk.modules()]
        self.attentions: list[Any] = [one for one in modules if isinstance(one, HasQueryKeyWeights)]
        self._group = group

    def take(self) -> list[torch.Tensor]:
        """Return the largest products of each attention, fp32 [heads], and forget them. Collective over the group."""
        cores: list[SDPAttention] = [attention.core_attention for attention in self.attentions]  # pyright: ignore[reportAssignmentType]
        found = [core.current_max_attn_logits for core in cores]
        for core in cores:
            core.current_max_attn_logits = None
        of_each = [one for one in found if one is not None]
        if not of_each:
            return []
        assert len(of_each) == len(cores), "every layer attends in every microbatch"
        flat = torch.cat(of_each)
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, self._group)
        return list(flat.split([len(one) for one in of_each]))


class QKClip:
    """Multiplies the weights of queries and keys within each update.

    Args:
        config: has the threshold and alpha.
        scores: of the model's attentions, with the weights in place.
        parts: the optimizers of the run.
    """

    def __init__(self, config: TransformerConfig, scores: LargestScores, parts: Iterable[Any]):
        self._scores = scores
        self._largest: list[torch.Tensor] = []
        """Largest products of the step, see `LargestScores.take`."""
        self._alpha, self._threshold = config.qk_clip_alpha, config.qk_clip_threshold
        # Between steps a module may have shards in the place of what they are known by.
        self._attentions = [(one, list(map(id, one.query_key_weights()))) for one in scores.attentions]
        self._factors: dict[int, torch.Tensor] = {}
        """Factors of the rows of each weight in the next update, by the weight's id()."""
        for part in parts:
            for optimizer in part.updater.torch_optimizers:
                optimizer.register_step_post_hook(lambda *_, part=part: self._scale(part))

    def take_scores(self) -> None:
        """Take the largest products of the passes of a step, whether it updates weights or not. Collective."""
        self._largest = self._scores.take()

    def before_update(self) -> None:
        """Have the next update end with the rescaling that the largest products of the step require."""
        for (attention, weights), largest_H in zip(self._attentions, self._largest, strict=True):
            key_heads = getattr(attention, "num_query_groups_per_partition", len(largest_H))
            shared_G = largest_H.unflatten(0, (key_heads, -1)).amax(1)
            factor_G = (self._threshold / shared_G.clamp(min=self._threshold)).view(-1, 1)
            of_query, of_key = factor_G**self._alpha, factor_G ** (1 - self._alpha)
            factors = QueryKeyFactors(of_query, of_key, factor_G, torch.ones_like(factor_G))
            self._factors |= zip(weights, attention.query_key_rows(factors), strict=True)

    @torch.no_grad()
    def _scale(self, part: Any) -> None:
        for weight, main in part.main_parameters():
            if (of_rows := self._factors.pop(id(weight), None)) is None:
                continue
            shard = row_shard(weight)
            own = of_rows if shard is None else of_rows[shard.first : shard.stop]
            whole = own.to(main).view(-1, 1).expand(-1, weight.shape[1:].numel())
            main.mul_(part.own(weight, whole.contiguous()).view_as(main))
