"""Translates our configuration to the one that megatron-core's modules and schedules read."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

from megatron_ext.config.derived.pipeline_split import core_layout, is_uneven, layer_counts
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.schema import Config
from megatron_ext.parts.kinds import attention_is_replaced
from megatron_ext.parts.mlp.compute import OfMultiplied
from megatron_ext.parts.mlp.describe import Activation, mlp_of
from megatron_ext.parts.own_parameters import layers_differ
from megatron_ext.parts.stack import layers, stack

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "xielu": F.silu,  # which no layer computes: its own has parameters
}


_OF_ONE_NAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization"),
    *("qk_l2_norm", "add_qkv_bias", "activation_func_clamp_value", "glu_linear_offset"),
    *("rotary_interleaved", "softmax_scale", "softmax_type", "hidden_dropout", "attention_dropout"),
    *("init_method_std", "transformer_impl", "tensor_model_parallel_size", "sequence_parallel"),
    *("context_parallel_size", "pipeline_model_parallel_size", "bf16", "fp16"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "gradient_accumulation_fusion", "qk_clip"),
    *("qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit", "mtp_use_repeated_layer"),
)
"""Fields that megatron-core's configuration has by our name."""

_OF_EXPERTS = (
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_dtype"),
    *("moe_router_bias_update_rate", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_scaling_factor", "moe_z_loss_coeff", "moe_apply_probs_on_input", "moe_input_jitter_eps"),
    *("moe_expert_capacity_factor", "moe_router_force_load_balancing", "moe_shared_expert_gate"),
    *("moe_shared_expert_intermediate_size", "moe_grouped_gemm", "moe_token_dispatcher_type"),
    "expert_model_parallel_size",
)
"""Fields of a mixture of experts that megatron-core's configuration has by our name."""


def transformer_config(config: Config, device_kind: str, *, on_meta: bool = False) -> TransformerConfig:
    """Translate `config`. The result is new on each call: megatron-core's schedules write to it.

    It is one for all layers: what differs between them is said by their specs (`parts.spec`).

    Args:
        config: the resolved configuration.
        device_kind: "cuda" or "cpu".
    """
    model, layout, training = config.model, config.layout, config.training
    on_cuda = device_kind == "cuda"
    dtype = getattr(torch, training.params_dtype)
    chunks = layout.virtual_pipeline_model_parallel_size
    exchanges = list(layout.cp_comm_type)
    # Fused by torch.compile on a GPU; on a CPU they are the same operations one by one. GELU is never fused.
    fuses = on_cuda and not training.disable_jit_fuser
    counts = layer_counts(config)
    inner = (layer.inner for layer in layers(config) if layer.inner is not None)
    first = next(inner, mlp_of(model, model.ffn_hidden_size))
    activation = _ACTIVATIONS[first.activation]
    translated = TransformerConfig(
        **_of_one_name(config, _OF_ONE_NAME),
        # By this it indexes word embeddings; a CPU looks them up with the same bits in every run.
        deterministic_mode=on_cuda and training.deterministic_mode,
        mtp_num_layers=model.mtp_num_layers or None,
        num_query_groups=model.num_key_value_heads,
        layernorm_epsilon=model.norm_epsilon,
        # It adds gradients of what is named q_layernorm over the ranks, which see whole latents each.
        qk_layernorm=model.qk_layernorm and not attention_is_replaced(model),
        add_bias_linear=not model.disable_bias_linear and model.num_experts is None,
        gated_linear_unit=model.gated_linear_unit,
        activation_func=activation if first.of_gate == 1.0 else OfMultiplied(activation, first.of_gate),
        experimental_attention_variant_loss_scale_func=(
            _set_scale_of_indexers if model.experimental_attention_variant == "dsa" else None
        ),
        # By this, too, it knows how layers are saved.
        linear_attention_freq=[1] * model.num_layers if layers_differ(config) else None,
        # model.initialize gives every parameter its value, so that megatron-core draws nothing.
        perform_initialization=False,
        # Where the model is built is then left to the caller.
        use_cpu_initialization=not on_cuda or on_meta,
        cp_comm_type=exchanges if exchanges[1:] else exchanges[0],
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=core_layout(counts, model.mtp_num_layers or 0) if is_uneven(counts) else None,
        microbatch_group_size_per_vp_stage=layout.microbatch_group_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        # Read by DDP when it wraps the model: gradients are then divided by the tokens of the whole global batch.
        calculate_per_token_loss=True,
        recompute_modules=list(training.recompute_modules or ("core_attn",)),
        # With two stages the previous rank is also the next one, and interleaved batched sends pair in the wrong
        # order; over gloo no batched send has a tag.
        batch_p2p_comm=on_cuda and chunks == 1,
        # Waiting for the exchange orders the streams already; this would wait for the whole device, for older torch.
        batch_p2p_sync=False,
        overlap_p2p_comm=chunks > 1 and not layout.no_overlap_p2p_communication,
        deallocate_pipeline_outputs=True,
        bias_dropout_fusion=fuses and not training.no_bias_dropout_fusion,
        bias_activation_fusion=fuses
        and model.swiglu
        and not training.no_bias_swiglu_fusion
        and not first.keeps_its_input_alone,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # Its gradient is cast to bfloat16 whatever the model's precision.
        cross_entropy_loss_fusion=False,
        cuda_graph_modules=[],
        **_mixture(config),
        **_kernels_of_transformer_engine(config),
    )
    # With a layout it makes this 1 where nothing is interleaved, but takes None alone for that elsewhere.
    translated.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    # It refuses biases of experts that ranks divide, which ours have.
    translated.add_bias_linear = not model.disable_bias_linear
    # It refuses a bias of softmax's scores, which ERNIE 4.5 has, and our router adds.
    translated.moe_router_enable_expert_bias = model.num_experts is not None and model.moe_router_enable_expert_bias
    return translated


def _set_scale_of_indexers(scale: torch.Tensor) -> None:
    """Scale the gradient of indexers' losses. megatron-core keeps the tensor of the first call and copies later ones
    into it, whatever its shape; each of our steps gives it as a scalar."""
    DSAIndexerLossAutoScaler.set_loss_scale(scale.reshape(()))


def _kernels_of_transformer_engine(config: Config) -> dict[str, Any]:
    """Return the attention kernels that Transformer Engine may choose; torch's kernels are set elsewhere."""
    training, backend = config.training, config.training.attention_backend
    if config.model.transformer_impl != "transformer_engine":
        return {}
    chosen = AttnBackend[backend] if backend != "local" else AttnBackend.auto
    return {"attention_backend": chosen, "flash_attention_version": training.flash_attention_version}


def _mixture(config: Config) -> dict[str, Any]:
    """Return the settings of a mixture of experts; none for a dense model."""
    model, layout, held = config.model, config.layout, stack(config)
    if model.num_experts is None:
        return {}
    losses = model.load_balancing_losses
    return {
        **_of_one_name(config, _OF_EXPERTS),
        "num_moe_experts": model.num_experts,
        # By which it knows how layers are saved.
        "moe_layer_freq": [int(layer.experts is not None) for layer in held[: model.num_layers]]
        if held.has_mixed_parameters
        else 1,
        "moe_ffn_hidden_size": model.expert_ffn_hidden_size,
        "moe_router_load_balancing_type": list(losses) or ("sinkhorn" if model.is_sinkhorn else "none"),
        "moe_aux_loss_coeff": list(losses.values()) or 0.0,
        "expert_tensor_parallel_size": layout.expert_tensor_size,
    }


def _of_one_name(config: Config, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of these fields, whose names are unique among all groups of the configuration."""
    return {name: getattr(getattr(config, options_by_name()[name].group), name) for name in names}
