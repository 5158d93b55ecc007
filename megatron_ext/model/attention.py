"""Core attention on torch's scaled_dot_product_attention: causal, grouped-query, no mask tensor.

Shapes: S sequence, B batch, H query heads of this rank, G key/value heads of this rank, D channels of a head.
"""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType


class SDPAttention(torch.nn.Module):
    """softmax(Q K^T / sqrt(D), causal) V (Vaswani et al. 2017, equation 1), by torch's fastest kernel for the device.

    Its signature is megatron-core's for a core attention.
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
    ) -> None:
        super().__init__()
        assert attn_mask_type is AttnMaskType.causal, f"only causal attention is implemented, not {attn_mask_type}"
        assert config.context_parallel_size == 1, "context parallelism needs another attention"
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout
        # Under sequence parallelism the whole block already draws from this rank's own generator.
        self.fork_generator = not config.sequence_parallel

    def forward(
        self,
        query_SBHD: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Returns the context, [S, B, H * D]. `attention_mask` is not read: the mask is causal."""
        if self.training and self.dropout > 0.0 and self.fork_generator:
            # Ranks hold different heads, so that their dropout masks must differ.
            with tensor_parallel.get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                return self._attend(query_SBHD, key_SBGD, value_SBGD)
        return self._attend(query_SBHD, key_SBGD, value_SBGD)

    def _attend(self, query_SBHD: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor) -> torch.Tensor:
        context_BHSD = F.scaled_dot_product_attention(
            query_SBHD.permute(1, 2, 0, 3),
            key_SBGD.permute(1, 2, 0, 3),
            value_SBGD.permute(1, 2, 0, 3),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_SBHD.size(2) != key_SBGD.size(2),
        )
        return context_BHSD.permute(2, 0, 1, 3).flatten(2)
