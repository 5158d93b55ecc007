"""Computes DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1, equations 1 to 4): an indexer
scores all keys for each query, and latent attention is over the best of them.

The indexer's inputs are detached: it learns from a loss of its own alone, the divergence of its distribution over keys
from attention's distribution, summed over all heads. Names of parameters are as in megatron-core's DSAttention, whose
kernels need a GPU. Scores are computed in fp32, and of equal ones the earlier key is taken, so that a query's choice
follows from its scores alone, in every layout: all ranks that share a sample's heads compute the same scores, and
context-parallel ranks gather the indexer's keys, which are small. Queries are taken some at a time: time grows as S T,
memory does not.

Shapes: S positions of this rank, s its slice under sequence parallelism, T all keys in the order of their positions, B
batch, H heads of this rank, D and V channels of a key and of a value head; I heads and E channels of the indexer; K
keys that a query attends to; Q queries of a block.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from torch.utils.checkpoint import checkpoint

from megatron_ext.data.packing import Documents, Segment, document_starts
from megatron_ext.parts.attention import context_parallel
from megatron_ext.parts.attention.compute import SDPAttention
from megatron_ext.parts.attention.rope import rotate
from megatron_ext.parts.linear.compute import WholeLinear
from megatron_ext.parts.norm.compute import norm_builder
from megatron_ext.parts.numbers import record
from megatron_ext.plugins.latent_attention.describe import INDEXER_LOSS, Indexer, LatentAttention

_BLOCK_NUMBERS = 1 << 24
"""Numbers of the largest tensor of a block of queries: 64 MiB in fp32."""

Index = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The indexer's queries [B, S, I, E], keys [B, S, E], and weights of heads, fp32 [B, S, I]."""


class LightningIndexer(torch.nn.Module):
    """Projects what scores are made of (equation 1)."""

    def __init__(
        self, config: TransformerConfig, query_rank: int, described: Indexer, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.described, self.tp_group = described, pg_collection.tp
        self.sequence_parallel = config.sequence_parallel  # by the name that inference in training switches off
        heads, size, hidden = described.heads, described.head_size, config.hidden_size
        norm: Any = norm_builder(described.norm)
        self.linear_wq_b = WholeLinear(config, query_rank, heads * size)
        vars(self.linear_wq_b.weight)["sequence_parallel"] = False  # it reads the latents of all tokens
        self.linear_wk = WholeLinear(config, hidden, size)
        self.k_norm = norm(config, size, described.norm.epsilon)
        self.linear_weights_proj = WholeLinear(config, hidden, heads)

    def forward(self, hidden_sBM: torch.Tensor, latent_sBR: torch.Tensor, table: torch.Tensor | None) -> Index:
        """Return queries, keys and weights. latent: of queries; table: of angles, whose channels come first here, or
        None where nothing is rotated."""
        described, hidden_sBM = self.described, hidden_sBM.detach()
        query_SBM = self.linear_wq_b(self._of_all_tokens(latent_sBR.detach()))
        key_SBE = self._of_all_tokens(self.k_norm(self.linear_wk(hidden_sBM)))
        weights_SBI = self._of_all_tokens(self.linear_weights_proj(hidden_sBM))
        query_BISE = query_SBM.unflatten(-1, (described.heads, described.head_size)).permute(1, 2, 0, 3)

        def turn(heads_BISE: torch.Tensor) -> torch.Tensor:
            return heads_BISE if table is None else rotate(heads_BISE, table, interleaved=described.interleaved)

        accurate = torch.promote_types(weights_SBI.dtype, torch.float32)
        scale = (described.heads * described.head_size) ** -0.5
        return (
            turn(query_BISE).transpose(1, 2),
            turn(key_SBE.transpose(0, 1)[:, None])[:, 0],
            weights_SBI.transpose(0, 1).to(accurate) * scale,
        )

    def _of_all_tokens(self, x_sBC: torch.Tensor) -> torch.Tensor:
        """Return the rows of all tensor-parallel ranks, which all compute the same of them."""
        if not self.sequence_parallel:
            return x_sBC
        return gather_from_sequence_parallel_region(  # pyright: ignore[reportReturnType]
            x_sBC.contiguous(), tensor_parallel_output_grad=False, group=self.tp_group
        )


def index_scores(query_BQIE: torch.Tensor, key_BTE: torch.Tensor, weights_BQI: torch.Tensor) -> torch.Tensor:
    """Return the scores of all keys, [B, Q, T], at least in fp32: sum over heads of weight x ReLU(query key)."""
    accurate = weights_BQI.dtype
    products = query_BQIE.to(accurate).flatten(1, 2) @ key_BTE.to(accurate).mT
    return (weights_BQI.unsqueeze(-2) @ products.unflatten(1, query_BQIE.shape[1:3]).relu()).squeeze(-2)


def best(scores_BQT: torch.Tensor, number: int) -> torch.Tensor:
    """Return the `number` keys with the highest scores, int64 [B, Q, K]; of equal ones the earlier."""
    return scores_BQT.sort(dim=-1, descending=True, stable=True).indices[..., :number]


class Bounds:
    """Says which keys each query may choose from: the keys `first` to `last`, both int64 [B or 1, S]."""

    def __init__(self, first: torch.Tensor, last: torch.Tensor) -> None:
        self.first, self.last = first, last

    @classmethod
    def of_segments(cls, segments: Sequence[Segment], queries: int, keys: int, device: torch.device) -> "Bounds":
        """Return the bounds of rows of `queries` queries and `keys` keys each; segments number the keys of all rows one
        after another."""
        first = torch.cat([torch.full((one.queries,), one.first_key) for one in segments]).view(-1, queries)
        ends = [one.first_key + one.keys for one in segments]
        last = torch.cat([torch.arange(end - one.queries, end) for one, end in zip(segments, ends, strict=True)])
        before = keys * torch.arange(len(first))[:, None]
        return cls((first - before).to(device), (last.view(-1, queries) - before).to(device))

    @classmethod
    def of_rows(cls, length: int, begins_BS: torch.Tensor | None, device: torch.device) -> "Bounds":
        """Return the bounds of causal attention within whole rows, or within the documents that begin in them."""
        last = torch.arange(length, device=device)[None]
        return cls(torch.zeros_like(last) if begins_BS is None else document_starts(begins_BS.cpu()).to(device), last)

    def sees(self, keys: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return whether these queries see `keys`, numbers [..., Q or 1, N]: bool of their shape."""
        return (keys >= self.first[:, rows, None]) & (keys <= self.last[:, rows, None])


class SparseAttention(SDPAttention):
    """Attends to the keys that the indexer chooses, or in its warm-up to all of them.

    Args:
        described: the attention, which has an indexer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *positional: Any,
        described: LatentAttention,
        pg_collection: ProcessGroupCollection,
        **settings: Any,
    ) -> None:
        super().__init__(config, *positional, pg_collection=pg_collection, **settings)
        assert described.indexer is not None, "validated: its sizes are given"
        assert described.query_rank is not None, "validated: queries have latents"
        self.described, self.tp_group = described.indexer, pg_collection.tp
        self.indexer = LightningIndexer(config, described.query_rank, described.indexer, pg_collection)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the indexer's weights as megatron-core's checkpoints take them."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        assert metadata is not None, "which ranks hold the same?"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    @torch.compiler.disable
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query_BHSD: torch.Tensor,
        key_BHSD: torch.Tensor,
        value_BHSV: torch.Tensor,
        *index: torch.Tensor,
        documents: Documents | None = None,
        bounds: Bounds | None = None,
    ) -> torch.Tensor:
        """Return the context, [S, B, H * V]. `bounds`: the keys that each query may choose from, given in inference
        alone."""
        key, value, (of_query, of_key, weights) = key_BHSD, value_BHSV, index
        batch, queries, group = len(query_BHSD), query_BHSD.size(2), self.cp_group
        if group is not None and bounds is None:
            key, value = context_parallel.all_positions(key, value, group)
            of_key = context_parallel.all_positions(of_key[:, None], of_key[:, None, :, :0], group)[0][:, 0]
        keys = key.size(2)
        if bounds is None:
            rank, size = (0, 1) if group is None else (group.rank(), group.size())
            segments = context_parallel.segments_of_rank(rank, size, keys) if size > 1 else (Segment(0, keys, 0, keys),)
            bounds = Bounds.of_segments(
                segments if documents is None else documents.segments, queries, keys, key.device
            )
        learns = self.training and torch.is_grad_enabled()
        heads = query_BHSD, key, value
        chosen, loss = _Choice.apply(
            of_query, of_key, weights, *(one.detach() for one in heads[:2]), bounds, self, learns
        )
        if self.described.warms_up or keys <= self.described.topk:
            context = super().forward(query_BHSD, key_BHSD, value_BHSV, documents)
        else:
            context = self._of_chosen(heads, chosen, bounds)
        if not learns:
            return context
        share = self.tp_group.size() * batch * queries * (1 if group is None else group.size())
        record(INDEXER_LOSS, loss / share)
        return DSAIndexerLossAutoScaler.apply(context, self.described.loss * loss)  # pyright: ignore[reportReturnType]

    def blocks(self, query_BHSD: torch.Tensor, keys: int) -> Iterator[slice]:
        """Yield the queries of each block."""
        batch, heads, queries, channels = query_BHSD.shape
        gathered = 2 * heads * channels * min(keys, self.described.topk)
        rows = max(1, _BLOCK_NUMBERS // (batch * max(gathered, (heads + self.described.heads) * keys)))
        return (slice(first, min(first + rows, queries)) for first in range(0, queries, rows))

    @property
    def scale(self) -> float:
        """Factor of the products of queries and keys."""
        assert self.softmax_scale is not None, "latent attention says its scale"
        return self.softmax_scale

    def _of_chosen(self, heads: Sequence[torch.Tensor], chosen_BSK: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        query, key, value = heads
        parts = []
        for rows in self.blocks(query, key.size(2)):
            places = chosen_BSK[:, rows]
            arguments = query[:, :, rows], key, value, places, bounds.sees(places, rows), self.scale
            # The backward pass gathers keys and values of the block again.
            parts.append(checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).flatten(2)

    def hides(self, index: Index, kept_BTC: torch.Tensor, unseen_B1ST: torch.Tensor | None) -> torch.Tensor | None:
        """Return a mask to add to the attention scores of each row's latest queries: 0 for keys that a query chooses,
        -infinity for the others. kept: cached latents, whose last channels are the indexer's keys, this pass's
        included."""
        if self.described.warms_up or kept_BTC.size(1) <= self.described.topk:
            return unseen_B1ST
        scores_BST = index_scores(index[0], kept_BTC[..., -self.described.head_size :], index[2])
        if unseen_B1ST is not None:
            scores_BST = scores_BST + unseen_B1ST[:, 0]
        chosen = best(scores_BST, self.described.topk)[:, None]
        hidden = kept_BTC.new_full(scores_BST[:, None].shape, -torch.inf).scatter_(-1, chosen, 0.0)
        return hidden if unseen_B1ST is None else hidden + unseen_B1ST


def _attend(
    query_BHQD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTV: torch.Tensor,
    chosen_BQK: torch.Tensor,
    seen_BQK: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return attention over the chosen keys that are seen, [B, H, Q, V] (equation 2)."""
    places = chosen_BQK.flatten(1)[:, None, :, None]

    def gathered(heads: torch.Tensor) -> torch.Tensor:
        indices = places.expand(-1, heads.size(1), -1, heads.size(-1))
        return heads.gather(2, indices).unflatten(2, chosen_BQK.shape[1:])

    scores = (query_BHQD.unsqueeze(-2) @ gathered(key_BHTD).mT).squeeze(-2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    weights = scores.masked_fill(~seen_BQK[:, None], -torch.inf).softmax(-1).to(value_BHTV.dtype)
    return (weights.unsqueeze(-2) @ gathered(value_BHTV)).squeeze(-2)


class _Choice(torch.autograd.Function):
    """Chooses keys, and computes the indexer's loss, the sum over queries, with its gradients, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        of_query: torch.Tensor,
        of_key: torch.Tensor,
        weights: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        bounds: Bounds,
        core: SparseAttention,
        learns: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        described, keys = core.described, key.size(2)
        number, places = min(described.topk, keys), torch.arange(keys, device=key.device)
        all_chosen, loss = [], weights.new_zeros(())
        gradients = [torch.zeros_like(one, dtype=weights.dtype) for one in (of_query, of_key, weights) if learns]
        for rows in core.blocks(query, keys):
            seen_BQT = bounds.sees(places, rows).expand(len(query), -1, -1)
            inputs = [one.detach().requires_grad_(learns) for one in (of_query[:, rows], of_key, weights[:, rows])]
            with torch.set_grad_enabled(learns):
                scores_BQT = index_scores(*inputs).masked_fill(~seen_BQT, -torch.inf)
            chosen = best(scores_BQT.detach(), number)
            all_chosen.append(chosen)
            if not learns:
                continue
            if described.learns_from_chosen and not described.warms_up:
                seen_BQT = seen_BQT & torch.zeros_like(seen_BQT).scatter_(-1, chosen, True)
            target_BQT = _target(query[:, :, rows], key, seen_BQT, core.scale, core.tp_group)
            with torch.enable_grad():
                predicted = scores_BQT.masked_fill(~seen_BQT, -torch.inf).log_softmax(-1).masked_fill(~seen_BQT, 0.0)
                of_block = (target_BQT.xlogy(target_BQT) - target_BQT * predicted).sum()
            for_query, for_key, for_weights = torch.autograd.grad(of_block, inputs)
            gradients[0][:, rows], gradients[2][:, rows] = for_query, for_weights
            gradients[1] += for_key
            loss += of_block.detach()
        chosen = torch.cat(all_chosen, dim=1)
        ctx.mark_non_differentiable(chosen)
        if learns:
            dtypes = of_query.dtype, of_key.dtype, weights.dtype
            ctx.save_for_backward(*(one.to(dtype) for one, dtype in zip(gradients, dtypes, strict=True)))
        return chosen, loss

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, _of_chosen: torch.Tensor, of_loss: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return *((one * of_loss).to(one.dtype) for one in ctx.saved_tensors), *[None] * 5


def _target(
    query_BHQD: torch.Tensor, key_BHTD: torch.Tensor, seen_BQT: torch.Tensor, scale: float, tp_group: Any
) -> torch.Tensor:
    """Return attention's distribution over these keys, the sum over the heads of all ranks divided by its own sum, [B,
    Q, T] (section 2.1.1)."""
    accurate = torch.promote_types(query_BHQD.dtype, torch.float32)
    scores = query_BHQD.to(accurate) @ key_BHTD.to(accurate).mT * scale
    weights_BQT = scores.masked_fill_(~seen_BQT[:, None], -torch.inf).softmax(-1).sum(1)
    if tp_group.size() > 1:
        torch.distributed.all_reduce(weights_BQT, group=tp_group)
    return weights_BQT / weights_BQT.sum(-1, keepdim=True)
