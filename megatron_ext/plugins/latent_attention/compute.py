"""Computes multi-head latent attention on plain torch (DeepSeek-V2, arXiv:2405.04434, section 2.1, equations 9 to 19).

megatron-core's MLASelfAttention needs Transformer Engine for whole down projections, and without it each rank keeps the
gradient of its own heads for the key's channels that all heads share. Names and the order of rows are as in
MLASelfAttention.

Shapes: S sequence (of this context-parallel rank), s its slice under sequence parallelism, B batch, H heads of this
rank, D = N + P channels of a query or key head, of which the last P are rotated, V of a value head, R of the latent of
keys and values.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.distributed import ProcessGroup

from megatron_ext.parts.attention.cached import Sequences, WholeSequences
from megatron_ext.parts.attention.compute import SDPAttention
from megatron_ext.parts.attention.query_key_factors import QueryKeyFactors
from megatron_ext.parts.attention.rope import rotate
from megatron_ext.parts.linear.compute import BiasedRowLinear, ColumnLinear, RowLinear, WholeLinear
from megatron_ext.parts.norm.compute import norm_builder
from megatron_ext.plugins.latent_attention.describe import LatentAttention
from megatron_ext.plugins.latent_attention.indexer import Bounds, SparseAttention


class LatentSelfAttention(MegatronModule):
    """Projects to latents, normalizes these, projects them to heads, rotates, attends, and projects the result.

    Args:
        attention: its description.
        rotary_columns: this layer's columns of the table of angles.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        *,
        attention: LatentAttention,
        rotary_columns: slice | None,
        **_unused: object,
    ) -> None:
        super().__init__(config)
        self.described, self.layer_number, self.rotary_columns = attention, layer_number, rotary_columns
        self.tp_group = pg_collection.tp
        self.checkpoint_core_attention = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or ()
        )
        hidden, rank, query_rank = config.hidden_size, attention.rank, attention.query_rank
        column: Any = partial(
            ColumnLinear,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )
        core = SDPAttention if attention.indexer is None else partial(SparseAttention, described=attention)
        self.core_attention = core(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            cp_comm_type,
            attention.score_scale,
            pg_collection=pg_collection,
            window=attention.window,
        )
        self.linear_proj: Any = (BiasedRowLinear if attention.output_bias else RowLinear)(
            attention.context_size,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=attention.output_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )
        if query_rank is None:
            self.linear_q_proj = column(hidden, attention.query_size)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, query_rank)
            self.linear_q_up_proj = column(query_rank, attention.query_size)
        self.linear_kv_down_proj = WholeLinear(config, hidden, rank + attention.position_size)
        self.linear_kv_up_proj = column(
            rank, attention.query_heads * (attention.head_size - attention.position_size + attention.value_head_size)
        )
        norm: Any = norm_builder(attention.norm) if attention.qk_norm is not None else None
        self.q_layernorm: Any = norm and query_rank and norm(config, query_rank, attention.norm.epsilon)
        self.kv_layernorm: Any = norm and norm(config, rank, attention.norm.epsilon)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Sequences | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the projected context, [s, B, hidden], and the bias that must still be added, if any. hidden_states:
        [s, B, hidden]; rotary_pos_emb: from `RotaryTable`. The mask is causal; `packed_seq_params` may attend in
        another way, and read some positions alone, [N, 1, hidden]."""
        assert attention_mask is None, "the mask is causal"
        table = None
        if self.rotary_columns is not None:
            assert rotary_pos_emb is not None, "some channels are rotated"
            table = rotary_pos_emb[..., self.rotary_columns].contiguous()
        query, latent, shared_key, *index = self._projected(hidden_states, table)
        if isinstance(packed_seq_params, WholeSequences):
            return self._inferred(query, latent, shared_key, index, packed_seq_params)
        core: Any = self.core_attention
        attend = core if packed_seq_params is None else packed_seq_params.attention(core, self.layer_number)
        heads_BHSD = query, *self._keys_and_values(latent, shared_key), *index
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(attend, False, *heads_BHSD)
        else:
            context = attend(*heads_BHSD)
        return self.linear_proj(context)

    def query_key_weights(self) -> list[torch.nn.Parameter]:
        """Return the weights that make queries, and keys and values."""
        of_query: Any = self.linear_q_proj if self.described.query_rank is None else self.linear_q_up_proj
        return [of_query.weight, self.linear_kv_up_proj.weight]  # pyright: ignore[reportReturnType]

    def query_key_rows(self, factors: QueryKeyFactors) -> list[torch.Tensor]:
        """Return the factors of the rows of each of `query_key_weights`. The rotated channels of keys are shared by all
        heads, so that their weight is not scaled: a query's rotated channels get both factors."""
        described = self.described
        plain = described.head_size - described.position_size
        return [
            factors.rows((factors.query, plain), (factors.both, described.position_size)),
            factors.rows((factors.key, plain), (factors.one, described.value_head_size)),
        ]

    def _projected(self, hidden_sBM: torch.Tensor, table: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return queries, [B, H, S, D], the latent of keys and values, [s, B, R], the channels of the key that all
        heads share, [B, 1, S, P], and the indexer's queries, keys and weights, if there is an indexer (`Index`). RoPE,
        if any, is applied to the last P channels of queries and to the shared channels of the key."""
        described, core, index = self.described, self.core_attention, ()
        if described.query_rank is None:
            query_SBM: torch.Tensor = self.linear_q_proj(hidden_sBM)[0]
        else:
            latent = self.linear_q_down_proj(hidden_sBM)
            latent = latent if self.q_layernorm is None else self.q_layernorm(latent)
            query_SBM = self.linear_q_up_proj(latent)[0]
            if isinstance(core, SparseAttention):
                index = core.indexer(hidden_sBM, latent, table)
        kept_sBM = self.linear_kv_down_proj(hidden_sBM)
        latent_sBR, shared_SBP = kept_sBM.split((described.rank, described.position_size), dim=-1)
        # The gradient of the channels that all heads share is the sum over all ranks' gradients.
        if self.config.sequence_parallel:
            shared_SBP = gather_from_sequence_parallel_region(shared_SBP.contiguous(), group=self.tp_group)
        elif self.tp_group.size() > 1:
            shared_SBP = copy_to_tensor_model_parallel_region(shared_SBP, group=self.tp_group)
        query = query_SBM.unflatten(-1, (-1, described.head_size)).permute(1, 2, 0, 3)
        shared_key = shared_SBP.transpose(0, 1)[:, None]
        if table is not None:
            plain, turned = query.split((described.head_size - described.position_size, described.position_size), -1)
            query = torch.cat((plain, rotate(turned, table, interleaved=True)), dim=-1)
            shared_key = rotate(shared_key, table, interleaved=True)
        # The product would keep a copy next to the whole that this is a part of.
        latent_sBR = latent_sBR.contiguous() if self.kv_layernorm is None else self.kv_layernorm(latent_sBR)
        return query, latent_sBR, shared_key, *index

    def _keys_and_values(
        self, latent_sBR: torch.Tensor, shared_key_B1SP: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys, [B, H, S, D], and the values, [B, H, S, V], of this rank's heads."""
        described = self.described
        up_SBM: torch.Tensor = self.linear_kv_up_proj(latent_sBR)[0]
        plain = described.head_size - described.position_size
        up_BHSM = up_SBM.unflatten(-1, (-1, plain + described.value_head_size)).permute(1, 2, 0, 3)
        key, value = up_BHSM.split((plain, described.value_head_size), dim=-1)
        shared = shared_key_B1SP.expand(-1, key.size(1), -1, -1)
        return torch.cat((key, shared), dim=-1), value.contiguous()

    def _inferred(
        self,
        query_BHSD: torch.Tensor,
        latent_SBR: torch.Tensor,
        shared_key_B1SP: torch.Tensor,
        index: list[torch.Tensor],
        inference: WholeSequences,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of `forward` in inference, without gradients; in the last layer only at the positions whose
        logits are read."""
        core = self.core_attention
        attend = inference.attention(core, self.layer_number)
        latent_B1SR = latent_SBR.transpose(0, 1)[:, None]
        # The indexer's keys lie after the channels of the one key head; queries are 0 in the indexer's channels.
        of_indexer = [index[1][:, None]] if index else []
        kept = torch.cat((latent_B1SR, shared_key_B1SP, *of_indexer), dim=-1)
        if inference.goes_on:
            query = self._absorbed(query_BHSD)
            if isinstance(core, SparseAttention):
                query = F.pad(query, (0, kept.size(-1) - query.size(-1)))
                attend = partial(attend, hides=partial(core.hides, index))  # pyright: ignore[reportArgumentType]
            context = self._values(attend(query, kept, latent_B1SR))
        else:
            inference.keep(self.layer_number, kept, self.described.rank)
            heads = query_BHSD, *self._keys_and_values(latent_SBR, shared_key_B1SP)
            if isinstance(core, SparseAttention):
                rows, length = query_BHSD.size(0), query_BHSD.size(2)
                bounds = Bounds.of_rows(length, inference.begins(rows, length), query_BHSD.device)
                context = core(*heads, *index, bounds=bounds)
            else:
                context = attend(*heads)
        return self.linear_proj(inference.narrowed(context, self))

    def _up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the up projection from a latent to keys, [H, N, R], and to values, [H, V, R]."""
        described = self.described
        plain, value = described.head_size - described.position_size, described.value_head_size
        up = self.linear_kv_up_proj.weight.unflatten(0, (-1, plain + value))
        return up[:, :plain], up[:, plain:]

    def _absorbed(self, query_BHSD: torch.Tensor) -> torch.Tensor:
        """Return queries that attend to latents, [B, H, S, R + P]: they absorb the up projection of keys, so that one
        key head serves all query heads (DeepSeek-V2, section 2.1.2)."""
        described = self.described
        plain, turned = query_BHSD.split((described.head_size - described.position_size, described.position_size), -1)
        return torch.cat((plain @ self._up()[0], turned), dim=-1)

    def _values(self, context_SBM: torch.Tensor) -> torch.Tensor:
        """Return the context of this rank's heads, [S, B, H * V], from the context over latents, [S, B, H * R]."""
        context_SBH1R = context_SBM.unflatten(-1, (-1, 1, self.described.rank))
        return (context_SBH1R @ self._up()[1].transpose(-1, -2)).flatten(2)


def mixer_spec(described: LatentAttention, _tp_group: ProcessGroup, columns: slice | None) -> ModuleSpec:
    """Return the spec of a layer's latent attention; `columns` is its part of the table of angles."""
    params = {"attn_mask_type": AttnMaskType.causal, "attention": described, "rotary_columns": columns}
    return ModuleSpec(LatentSelfAttention, params)
