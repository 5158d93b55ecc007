"""Small resolved configurations for tests, and the model that one of them describes."""

import dataclasses
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext import device
from megatron_ext.config.schema import Config, DataConfig, LayoutConfig, ModelConfig, TrainingConfig
from megatron_ext.model.config import transformer_config
from megatron_ext.model.gpt import GPT, build_model
from megatron_ext.model.initialize import initialize
from megatron_ext.parallel import groups

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


def config_of_two(layout: dict[str, Any] | None = None, **optimizer: Any) -> Config:
    """Return the small model's configuration for two ranks, with these flags of the layout and of the optimizer."""
    config = small_config(layout={"world_size": 2, **(layout or {})})
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **optimizer))


def build_small_model(config: Config) -> tuple[list[GPT], ProcessGroupCollection]:
    """Start the groups of `config.layout` in this process, and build and initialize its chunks."""
    pg_collection = groups.initialize(config.layout, device.current())
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
    chunks = build_model(config, transformer_config(config, "cpu"), pg_collection)
    initialize(chunks, config, pg_collection)
    return chunks, pg_collection
