"""Small resolved configurations for tests, and the model that one of them describes.

Only who builds the model loads torch: tests of the rooms without it use the configurations.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_ext.config.schema import Config, DataConfig, LayoutConfig, ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.model.gpt import GPT

LLAMA: dict[str, Any] = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
OLMO2 = {**LLAMA, "norm_position": "after", "qk_layernorm": True, "qk_layernorm_over": "projection"}
LATENTS: dict[str, Any] = {
    **{name: value for name, value in LLAMA.items() if "query" not in name},
    **{"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 20, "kv_lora_rank": 24},
    **{"qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "rotary_scaling_factor": 4.0},
    **{"original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 0.4},
}
"""Latent attention whose queries have latents too, with YaRN."""
INDEXED: dict[str, Any] = {
    **{**LATENTS, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 5, "dsa_indexer_head_dim": 10},
    "dsa_indexer_topk": 4,
}
"""Latent attention over four keys."""

DELTA: dict[str, Any] = {
    **LLAMA,
    **{"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "2", "linear_key_head_dim": 6},
    **{"linear_value_head_dim": 10, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
"""A gated delta rule in every other layer."""

MAMBA: dict[str, Any] = {
    **{**LLAMA, "position_embedding_type": "none", "hybrid_layer_pattern": "M*M-", "mamba_state_dim": 6},
    **{"mamba_head_dim": 10, "mamba_num_groups": 2, "mamba_num_heads": 6},
}
"""Mamba-2, attention and an MLP in layers of their own."""

CONVOLUTIONS: dict[str, Any] = {**LLAMA, "full_attn_idxs": (1,), "conv_l_cache": 4}
"""Gated short convolutions in all layers but the second."""

MIXTURE = {
    **{"num_experts": 6, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "disable_bias_linear": True},
    **{"moe_shared_expert_intermediate_size": 32, "swiglu": True},
}
"""Experts for `distinct_config`."""


def small_config(
    model: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    vocab_size: int = 250,
) -> Config:
    """A GPT-2-shaped model of four layers (biases, learned positions, tied embeddings) unless told otherwise."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 16,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "padded_vocab_size": 256,
    }
    return Config(
        model=ModelConfig(**{**sizes, **(model or {})}),
        layout=LayoutConfig(**{"world_size": 1, **(layout or {})}),
        training=TrainingConfig(**{"micro_batch_size": 2, "global_batch_size": 4, **(training or {})}),
        data=DataConfig(vocab_size=vocab_size),
    )


def config_with(**groups: dict[str, Any]) -> Config:
    """Return the small model's configuration with other values in some of its groups."""
    config = small_config()
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


def distinct_config(
    model: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, training: dict[str, Any] | None = None
) -> Config:
    """Return a configuration whose sizes differ wherever two could be mistaken for each other."""
    sizes: dict[str, Any] = {
        **{"num_layers": 4, "hidden_size": 48, "ffn_hidden_size": 40, "num_attention_heads": 6, "kv_channels": 10},
        **{"num_query_groups": 2, "group_query_attention": True, "max_position_embeddings": 99, "seq_length": 32},
        **{"padded_vocab_size": 128, "init_method_std": 0.03},
    }
    return Config(
        model=ModelConfig(**{**sizes, **(model or {})}),
        layout=LayoutConfig(**{"world_size": 1, **(layout or {})}),
        training=TrainingConfig(
            **{"micro_batch_size": 2, "global_batch_size": 12, "train_iters": 9, **(training or {})}
        ),
        data=DataConfig(vocab_size=100),
    )


def config_of_two(layout: dict[str, Any] | None = None, **optimizer: Any) -> Config:
    """Return the small model's configuration for two ranks, with these flags of the layout and of the optimizer."""
    config = small_config(layout={"world_size": 2, **(layout or {})})
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **optimizer))


def build_small_model(config: Config) -> "tuple[list[GPT], ProcessGroupCollection]":
    """Start the groups of `config.layout` in this process, and build and initialize its chunks."""
    from megatron.core import tensor_parallel

    from megatron_ext import device
    from megatron_ext.model.config import transformer_config
    from megatron_ext.model.gpt import build_model
    from megatron_ext.model.initialize import initialize
    from megatron_ext.parallel import groups

    pg_collection = groups.initialize(config.layout, device.current())
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
    chunks = build_model(config, transformer_config(config, "cpu"), pg_collection)
    initialize(chunks, config, pg_collection)
    return chunks, pg_collection
