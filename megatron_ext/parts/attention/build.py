"""Builds the spec of attention on plain torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.distributed import ProcessGroup

from megatron_ext.parts.attention.compute import CausalSelfAttention, SDPAttention
from megatron_ext.parts.attention.describe import Attention
from megatron_ext.parts.linear.compute import BiasedRowLinear, ColumnLinear, RowLinear
from megatron_ext.parts.norm.compute import query_key_norms


def attention_spec(
    attention: Attention, tp_group: ProcessGroup, columns: slice | None, module: type = CausalSelfAttention
) -> ModuleSpec:
    """Return the spec of a layer's attention.

    Args:
        tp_group: the ranks that share its heads.
        columns: its part of the table of angles; None where it rotates nothing.
        module: the class to build.
    """
    query_norm, key_norm = query_key_norms(attention, tp_group)
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal, "rotary_columns": columns, "described": attention},
        submodules=SelfAttentionSubmodules(
            linear_qkv=_with_outputs(ColumnLinear, attention.qkv_size),  # pyright: ignore[reportArgumentType]
            core_attention=partial(  # pyright: ignore[reportArgumentType]
                SDPAttention, window=attention.window, softmax=attention.softmax
            ),
            linear_proj=_with_inputs(  # pyright: ignore[reportArgumentType]
                BiasedRowLinear if attention.output_bias else RowLinear, attention.context_size
            ),
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )


def _with_outputs(build: Callable[..., Any], outputs: int) -> Callable[..., Any]:
    """Return a function that builds a linear layer with this number of outputs, whatever number it is given."""
    return lambda inputs, _outputs, **settings: build(inputs, outputs, **settings)


def _with_inputs(build: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """Return a function that builds a linear layer with this number of inputs, whatever number it is given."""
    return lambda _inputs, outputs, **settings: build(inputs, outputs, **settings)
