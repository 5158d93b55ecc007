"""Builds the spec of a transformer layer's modules: ours on plain torch, or Transformer Engine's."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.experts.compute import mixture_of_experts
from megatron_ext.parts.layer import ResidualLayer
from megatron_ext.parts.linear.compute import BiasedColumnLinear, BiasedRowLinear, ColumnLinear, RowLinear
from megatron_ext.parts.mlp.compute import FeedForward, XieluFeedForward
from megatron_ext.parts.norm.compute import norm_builder
from megatron_ext.parts.protocol import Depth
from megatron_ext.parts.stack import Layer, Stack, Table, final_norm, rotary_tables
from megatron_ext.registry import load

OwnSpec = Callable[[ModuleSpec, Layer], ModuleSpec]
"""From the spec of a layer and its description, the spec to build in its place."""


def block_spec(
    config: Config, held: Stack, tp_group: ProcessGroup, own: OwnSpec | None = None
) -> tuple[TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules | None]:
    """Return the layers of one model chunk, each by its own description, and the final norm that the last chunk has;
    and the depths of multi-token prediction that it has, if any.

    Args:
        config: the resolved configuration.
        held: the chunk's layers.
        tp_group: the ranks that share each layer.
        own: changes the spec of each layer.
    """
    if config.model.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        specs, final = {kind: _transformer_engine_spec(kind) for kind, _ in held.kinds}, TENorm
    else:
        tables = rotary_tables(config)
        specs = {kind: layer_spec(kind, tp_group, tables) for kind, _ in held.kinds}
        final = norm_builder(final_norm(config.model))
    built = [layer for layer in held if not layer.repeats]
    chosen = [specs[layer] if own is None else _checked(own(specs[layer], layer), layer) for layer in built]
    decoder = [spec for spec, layer in zip(chosen, built, strict=True) if layer.next_token is None]
    ahead: dict[int, tuple[Depth, list[ModuleSpec]]] = {}
    for spec, layer in zip(chosen, built, strict=True):
        if (one := layer.next_token) is not None:
            ahead.setdefault(one.depth, (one, []))[1].append(spec)
    depths = [
        load(one.builder)(final_norm(config.model), specs, one.place is not None) for one, specs in ahead.values()
    ]
    block = TransformerBlockSubmodules(layer_specs=decoder, layer_norm=final)
    return block, MultiTokenPredictionBlockSubmodules(depths) if depths else None


def _checked(spec: object, layer: Layer) -> ModuleSpec:
    """Return the spec that a user's function made of a layer's spec, checked.

    Raises:
        ConfigurationError: it is no spec.
    """
    if not isinstance(spec, ModuleSpec):
        raise ConfigurationError(
            f"layer_spec= returned {type(spec).__name__} for layer {layer.number}: it must return the ModuleSpec to "
            "build, as dataclasses.replace(spec, module=...) does, or the one that it was given"
        )
    return spec


def layer_spec(
    layer: Layer, tp_group: ProcessGroup, tables: Mapping[Table, slice] = MappingProxyType({})
) -> ModuleSpec:
    """Return one layer on plain torch: it needs neither Transformer Engine nor apex.

    Args:
        tables: where each table of angles lies in the tensor of them all, where there are several.
    """
    norm = norm_builder(layer.norm)
    before = norm if layer.norms_before else IdentityOp
    return ModuleSpec(
        module=ResidualLayer,
        params={
            **({"norm_after": norm, "normed_after": layer.normed_after} if layer.norms_after else {}),
            **({"is_parallel": True} if layer.parallel else {}),
        },
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if layer.mixer is None else before,
            self_attention=_mixer(layer, tp_group, tables),
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=IdentityOp if layer.mlp is None or layer.parallel == "one-norm" else before,
            mlp=mixture_of_experts(layer.experts) if layer.experts is not None else _dense_mlp(layer),
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        ),
    )


def _columns(layer: Layer, tables: Mapping[Table, slice]) -> slice | None:
    """Return the columns of the layer's table; all where there is no other, None where the layer rotates nothing."""
    if layer.rotary_table is None:
        return None
    return tables[layer.rotary_table] if len(tables) > 1 else slice(None)


def _mixer(layer: Layer, tp_group: ProcessGroup, tables: Mapping[Table, slice]) -> Any:
    if layer.mixer is None:
        return IdentityOp
    return load(layer.mixer.builder)(layer.mixer, tp_group, _columns(layer, tables))


def _transformer_engine_spec(layer: Layer) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=layer.attention.qk_norm == "head")


def _dense_mlp(layer: Layer) -> Any:
    if layer.mlp is None:
        return IdentityOp
    if layer.inner is not None and layer.inner.bias:
        matrices = MLPSubmodules(linear_fc1=BiasedColumnLinear, linear_fc2=BiasedRowLinear)
    else:
        matrices = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    learns = layer.inner is not None and layer.inner.activation == "xielu"
    return partial((XieluFeedForward if learns else FeedForward).as_mlp_submodule, submodules=matrices)
