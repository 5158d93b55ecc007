"""Computes self-attention with torch's scaled_dot_product_attention: causal, grouped-query, no mask tensor.

Shapes: S sequence (of this context-parallel rank), B batch, H query heads of this rank, G key/value heads of this rank,
D channels of a query or key head, V of a value head.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_ext.data.packing import Documents, Segment
from megatron_ext.parts.attention import context_parallel
from megatron_ext.parts.attention.blocks import widened
from megatron_ext.parts.attention.cached import Sequences
from megatron_ext.parts.attention.describe import LARGEST_SCORE, VANILLA, Softmax
from megatron_ext.parts.attention.describe import Attention as Described
from megatron_ext.parts.attention.query_key_factors import QueryKeyFactors
from megatron_ext.parts.attention.rope import TokenAngles, heated, rotate, split_and_rotate
from megatron_ext.parts.attention.scores import PLAIN, Scores, causal_slopes
from megatron_ext.parts.attention.segments import attend_documents, attend_window, largest_scores
from megatron_ext.parts.attention.short import attend_short, takes
from megatron_ext.parts.numbers import record

_ALL = slice(None)


class CausalSelfAttention(SelfAttention):
    """megatron-core's self-attention with a forward pass of our own: project, rotate, attend, project.

    Its parameters, and how they are divided over the ranks, are megatron-core's.

    Args:
        rotary_columns: this layer's columns of the table of angles; None where it rotates nothing.
        described: its description; `rotary_columns` hold factors of positions where it has a temperature.
    """

    def __init__(
        self,
        *positional: Any,
        described: Described,
        rotary_columns: slice | None = _ALL,
        **settings: Any,
    ) -> None:
        super().__init__(*positional, **settings)
        self.rotary_columns, self.described = rotary_columns, described
        self.is_heated = described.temperature is not None
        self.heats_rotated = described.rotary is not None and described.rotary.of_queries is not None
        # megatron-core counts them by one configuration of all layers.
        self.num_query_groups_per_partition = max(described.groups // self.world_size, 1)
        self.num_attention_heads_per_partition = described.query_heads // min(described.groups, self.world_size)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | Any = None,
        packed_seq_params: Sequences | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the projected context, [S, B, hidden], and the bias that must still be added, if any.

        Args:
            hidden_states: [S, B, hidden].
            attention_mask: always None; attention is causal.
            rotary_pos_emb: angles from `RotaryTable`.
            packed_seq_params: attends in place of the core, for example within documents or to cached keys; in the last
                layer it may leave only the positions that are read, and the result is then [N, 1, hidden].
        """
        assert attention_mask is None, "the mask is causal"
        if self.rotary_columns != _ALL and rotary_pos_emb is not None:
            columns = self.rotary_columns
            rotary_pos_emb = None if columns is None else rotary_pos_emb[..., columns].contiguous()
        core: Any = self.core_attention
        attend = core if packed_seq_params is None else packed_seq_params.attention(core, self.layer_number)
        table = factors = rotary_pos_emb
        if self.heats_rotated and rotary_pos_emb is not None:
            table, factors = rotary_pos_emb[..., :-1].contiguous(), rotary_pos_emb[..., -1:]
        is_plain = isinstance(core, SDPAttention) and packed_seq_params is None
        by_token = is_plain and core.reads_tokens(hidden_states, self.described.head_size)
        *heads_BHSD, gate_SBHD = self._heads(hidden_states, None if self.is_heated else table, by_token)
        if (self.is_heated or self.heats_rotated) and factors is not None:
            heads_BHSD[0] = heated(heads_BHSD[0], factors)
        if heads_BHSD[0].size(2) > 1 and not (is_plain and core.reads_views(heads_BHSD)):
            # Contiguous heads cost a copy, and save more than that in the attention's strided reads.
            heads_BHSD = [head.contiguous() for head in heads_BHSD]
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(attend, False, *heads_BHSD)
        else:
            context = attend(*heads_BHSD)
        context = self._gated(context, gate_SBHD)
        if packed_seq_params is not None:
            context = packed_seq_params.narrowed(context, self)
        return self.linear_proj(context)

    def _heads(
        self, hidden_states: torch.Tensor, table: torch.Tensor | TokenAngles | None, by_token: bool
    ) -> tuple[Any, ...]:
        """Return queries, [B, H, S, D], keys and values, [B, G, S, D], rotated if there is a table of angles, and the
        gate of the attention output, [S, B, H, V or 1], if there is one; `by_token` as in `rotate`."""
        # Norms of rotated heads read rows that are evenly spaced.
        by_token = by_token and getattr(self.q_layernorm, "of_rotated", None) is None
        turn: dict[str, bool] = {"interleaved": self.config.rotary_interleaved, "by_token": by_token}
        # A GPU's kernels read heads where they are, where nothing is to be rotated.
        written = table is not None or hidden_states.device.type == "cpu"
        one_token = isinstance(table, TokenAngles)
        if written and not one_token and self._splits_at_once and not torch.compiler.is_compiling():
            product: Any = self.linear_qkv
            mixed, groups = self._clipped(product(hidden_states)[0]), self.num_query_groups_per_partition
            per_group = self.num_attention_heads_per_partition // groups
            mixed_SBGM = mixed.view(*mixed.shape[:-1], groups, -1)
            return *split_and_rotate(mixed_SBGM, per_group, table, **turn), None
        heads_SBHD: Any = self._projected(hidden_states)
        gate_SBHD = heads_SBHD[3] if self.described.gate else None
        heads_SBHD = [self._clipped(heads) for heads in heads_SBHD[:3]]
        if isinstance(table, TokenAngles):
            heads_SBHD, table = (*table.turned(*heads_SBHD[:2]), heads_SBHD[2]), None
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in heads_SBHD)
        value = value if self.described.of_values == 1.0 else value * self.described.of_values
        if table is not None:
            query, key = rotate(query, table, **turn), rotate(key, table, **turn)
        return *self._rotated_and_normed(query, key), value, gate_SBHD

    def _projected(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, [S, B, H, D], keys, [S, B, G, D], both through their norms, values, [S, B, G, V], and gates,
        [S, B, H, V or 1], if there are any."""
        product: Any = self.linear_qkv
        described, mixed = self.described, product(hidden_states)[0]
        group, together = self.pg_collection.tp, self.world_size // described.groups
        if together > 1:  # ranks share a group, of which each has a part of the rows
            mixed = tensor_parallel.all_gather_last_dim_from_tensor_parallel_region(mixed, group=group)
            mixed = mixed.chunk(described.groups, dim=-1)[group.rank() // together]
        mixed_SBGM = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        *of_queries, key, value = mixed_SBGM.split(described.sections, dim=-1)
        of_queries = [one.reshape(*mixed.shape[:2], self.num_attention_heads_per_partition, -1) for one in of_queries]
        if together > 1:
            of_queries = [one.chunk(together, dim=2)[group.rank() % together] for one in of_queries]
        query, *gates = of_queries
        norms: tuple[Any, Any] = self.q_layernorm, self.k_layernorm
        query, key = (x if norm is None else norm(x) for x, norm in zip((query, key), norms, strict=True))
        return query, key, value, *gates

    def _clipped(self, x: torch.Tensor) -> torch.Tensor:
        clip = self.described.clip
        return x if clip is None else x.clamp(-clip, clip)

    def _gated(self, context_SBC: torch.Tensor, gate_SBHD: torch.Tensor | None) -> torch.Tensor:
        if gate_SBHD is None:
            return context_SBC
        heads_SBHV = context_SBC.unflatten(-1, (gate_SBHD.size(2), -1))
        return (heads_SBHV * gate_SBHD.float().sigmoid()).to(context_SBC.dtype).flatten(2)

    def _rotated_and_normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both through their norms, where these stand after the rotation."""
        of_query, of_key = (getattr(norm, "of_rotated", None) for norm in (self.q_layernorm, self.k_layernorm))
        return (query, key) if of_query is None or of_key is None else (of_query(query), of_key(key))

    def query_key_weights(self) -> list[torch.nn.Parameter]:
        """Return the weight that makes queries, keys and values."""
        return [self.linear_qkv.weight]  # pyright: ignore[reportReturnType]

    def query_key_rows(self, factors: QueryKeyFactors) -> list[torch.Tensor]:
        """Return the factors of the QKV weight's rows, group by group."""
        queries, *gates, keys, values = self.described.sections
        others = ((factors.one, gate) for gate in gates)
        parts = ((factors.query, queries), *others, (factors.key, keys), (factors.one, values))
        return [factors.rows(*parts)]

    @property
    def _splits_at_once(self) -> bool:
        """Whether nothing happens to queries and keys between their product and their rotation: no norm, no choice of
        heads where ranks share a group, and no gate between them; and nothing to values."""
        described = self.described
        if described.gate or described.value_head_size != described.head_size or described.of_values != 1.0:
            return False
        return self.q_layernorm is None and self.k_layernorm is None and described.groups >= self.world_size


class SDPAttention(torch.nn.Module):
    """Computes softmax(Q K^T / sqrt(D), causal) V (Vaswani et al. 2017, equation 1), by torch's fastest kernel for the
    device.

    It is built as megatron-core builds a core attention, and called by `CausalSelfAttention`. Its parameter, where the
    softmax has a learned sink, is named and divided as megatron-core's is.

    Args:
        softmax: how products become weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        window: int | None = None,
        softmax: Softmax = VANILLA,
    ) -> None:
        super().__init__()
        self.window, self.softmax = window, softmax
        assert attn_mask_type is AttnMaskType.causal, f"only causal attention is implemented, not {attn_mask_type}"
        assert pg_collection is not None or config.context_parallel_size == 1, "which ranks share a sample?"
        self.cp_group = pg_collection.cp if pg_collection is not None and config.context_parallel_size > 1 else None
        self.cp_comm_type = cp_comm_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout
        self.current_max_attn_logits: torch.Tensor | None = None
        """The largest product of a query with a key that it sees, times the scale, in the passes of the training since
        this was None; fp32 [H], with QK-clip."""
        self._clips = config.qk_clip
        self._measures = config.qk_clip or config.log_max_attention_logit
        # Under sequence parallelism the whole block already draws from this rank's own generator.
        self.fork_generator = not config.sequence_parallel
        if softmax == VANILLA:
            return
        tp_group: Any = None if pg_collection is None else pg_collection.tp
        rank, size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
        self.tp_group, heads = tp_group, config.num_attention_heads
        self._bounded = Scores(softmax.cap, softmax.slopes(heads)).of_heads(rank, size)
        if softmax.sink == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads // size, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    @property
    def scores(self) -> Scores:
        """Cap, slopes and sink of the scores of this rank's heads."""
        if self.softmax == VANILLA:
            return PLAIN
        sinks = {"vanilla": None, "off-by-one": 0.0}
        return replace(self._bounded, sink_H=sinks.get(self.softmax.sink, getattr(self, "softmax_offset", None)))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the sinks in the form of megatron-core's checkpoints."""
        if self.softmax.sink != "learnable":
            return {}
        assert metadata is not None, "which ranks hold the same?"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def reads_views(self, heads_BHSD: list[torch.Tensor]) -> bool:
        """Return whether heads of whole sequences stay as they lie. A GPU's kernels read rows of channels that begin at
        multiples of 16 bytes; a CPU reads any, and views of one product keep no more memory than copies."""
        query, key, value = heads_BHSD
        if key.device.type == "cuda":
            return self.reads_tokens(key, key.size(-1))
        if torch.compiler.is_compiling() or not self._is_whole(None, key):
            return False
        return query.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()

    def reads_tokens(self, x: torch.Tensor, channels: int) -> bool:
        """Return whether a GPU's kernels read heads of so many channels, of the type of x, in the order of tokens. They
        write the output in the order of the queries."""
        return x.device.type == "cuda" and self._is_whole(None, x) and channels * x.element_size() % 16 == 0

    def _is_whole(self, documents: Documents | None, heads: torch.Tensor) -> bool:
        """Return whether `_whole` computes the attention of such heads, [B, H or G, S, D]."""
        whole = documents is None and self.cp_group is None and self.softmax == VANILLA
        return whole and (self.window is None or takes(heads, self.dropout, self.window))

    def forward(
        self,
        query_BHSD: torch.Tensor,
        key_BGSD: torch.Tensor,
        value_BGSV: torch.Tensor,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Returns the context, [S, B, H * V]. With `documents` of this rank's positions, tokens see their own document
        alone."""
        attend: Any = self._whole if self._is_whole(documents, query_BHSD) else partial(self._divided, documents)
        heads = query_BHSD, key_BGSD, value_BGSV
        if self._measures and self.training:
            measure: Any = self._measure  # whose decorator hides its arguments' types
            measure(query_BHSD.detach(), key_BGSD.detach(), documents)
        if self.training and self.dropout > 0.0 and self.fork_generator:
            # Ranks hold different heads, so that their dropout masks must differ.
            with tensor_parallel.get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                context_BHSV = attend(*heads)
        else:
            context_BHSV = attend(*heads)
        return context_BHSV.permute(2, 0, 1, 3).flatten(2)

    @torch.compiler.disable
    def _measure(self, query: torch.Tensor, key: torch.Tensor, documents: Documents | None) -> None:
        """Update the largest score by the products of these queries with the keys that they see, whatever rank has the
        keys."""
        group, length = self.cp_group, key.size(2)
        segments: tuple[Segment, ...] = (Segment(0, length, 0, length),)
        if group is not None:
            key = context_parallel.all_positions(key, key[..., :0], group)[0]
            segments = context_parallel.segments_of_rank(group.rank(), group.size(), key.size(2))
        if documents is not None:
            segments = documents.segments
            query, key = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key))
        scale = self.softmax_scale or 1.0 / math.sqrt(query.size(-1))
        largest = largest_scores(query, key, segments, scale, self.window)
        record(LARGEST_SCORE, largest.max())
        if self._clips:
            before = self.current_max_attn_logits
            self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)

    def _whole(
        self,
        query_BHSD: torch.Tensor,
        key_BGSD: torch.Tensor,
        value_BGSV: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scale = self.softmax_scale or 1.0 / math.sqrt(query_BHSD.size(-1))
        if mask is None and takes(query_BHSD, self.dropout, self.window):
            return attend_short(query_BHSD, key_BGSD, value_BGSV, scale, self.window)
        # Most of torch's kernels know one size of heads alone, and the others hold all scores.
        query, key, value = widened(query_BHSD, key_BGSD, value_BGSV)
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        channels = value_BGSV.size(-1)
        return context if channels == context.size(-1) else context[..., :channels]

    @torch.compiler.disable
    def _divided(
        self, documents: Documents | None, query_BHSD: torch.Tensor, key_BGSD: torch.Tensor, value_BGSV: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention where a query sees a window, where samples are divided over ranks or into documents, or
        several of these."""
        query, key, value = query_BHSD, key_BGSD, value_BGSV
        group, window, scale = self.cp_group, self.window, self.softmax_scale or 1.0 / math.sqrt(query.size(-1))
        scores = self.scores
        if group is not None and self.cp_comm_type == "a2a":  # all positions of some heads
            scores = scores.of_heads(group.rank(), group.size())
            if documents is not None:
                documents = documents.whole
                assert documents is not None, "the loader has both where heads are exchanged"
        how: dict[str, Any] = {"scale": scale, "window": window, "scores": scores}
        attend: Any = self._whole
        if documents is not None:
            attend = partial(attend_documents, documents=documents, **how)
        elif self.training and self.dropout > 0.0 and scores.slopes is not None:
            length = query.size(2) * (group.size() if group is not None else 1)
            attend = partial(self._whole, mask=causal_slopes(scores.slopes, length, query.dtype, query.device))
        elif window is not None or not scores.are_plain:
            attend = partial(attend_window, **how)
        if group is None:
            return attend(query, key, value)
        if self.cp_comm_type == "a2a":
            return context_parallel.attend_by_heads(query, key, value, group, attend)
        assert self.dropout == 0.0, "validated: blocks are put together without dropout"
        if documents is not None:
            assert self.cp_comm_type == "all_gather", "validated: documents need all keys at once"
            return attend(query, *context_parallel.all_positions(key, value, group))
        if self.cp_comm_type == "all_gather":
            return context_parallel.attend_gathered(query, key, value, group, scale, window, scores)
        assert window is None, "validated: the ring knows no windows"
        return context_parallel.attend_ring(query, key, value, group, scale, scores)
