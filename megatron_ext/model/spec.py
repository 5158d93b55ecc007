"""What a transformer layer is made of: ours on plain torch, or Transformer Engine's."""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_ext.config.schema import ModelConfig
from megatron_ext.model.attention import CausalSelfAttention, SDPAttention
from megatron_ext.model.layer import PreNormLayer
from megatron_ext.model.linear import ColumnLinear, RowLinear
from megatron_ext.model.moe import mixture_of_experts
from megatron_ext.model.norm import norm_class


def block_spec(model: ModelConfig, num_layers: int) -> TransformerBlockSubmodules:
    """The layers of one model chunk, and the final norm that the last chunk has."""
    if model.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_layernorm)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(model)] * num_layers, layer_norm=norm_class(model.normalization)
    )


def layer_spec(model: ModelConfig) -> ModuleSpec:
    """One layer on plain torch: it needs neither Transformer Engine nor apex."""
    norm = norm_class(model.normalization)
    head_norm = norm if model.qk_layernorm else None
    attention = ModuleSpec(
        module=CausalSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=SDPAttention,  # pyright: ignore[reportArgumentType]
            linear_proj=RowLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    return ModuleSpec(
        module=PreNormLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=norm,
            mlp=mixture_of_experts() if model.num_experts is not None else _dense_mlp(),
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        ),
    )


def _dense_mlp() -> Any:
    return partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear))
