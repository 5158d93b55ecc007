"""Sizes of a model in closed form: parameters, floating-point operations, and bytes of training state.

Symbols: L layers, H hidden size, F MLP width, S sequence length, V vocabulary, nh heads and ng query groups of
size hd.
"""

from dataclasses import dataclass

from megatron_ext.config.layout import chunk_layers
from megatron_ext.config.schema import Config, ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model with its true vocabulary; a matrix that is tied is counted once."""

    embeddings: int
    layers: int
    final_norm: int
    output: int

    @property
    def total(self) -> int:
        return self.embeddings + self.layers + self.final_norm + self.output

    @property
    def without_embeddings(self) -> int:
        return self.layers + self.final_norm


def count_parameters(config: Config) -> ParameterCount:
    """Parameters of the whole model; padding of the vocabulary is not counted."""
    model, vocabulary = config.model, _vocabulary(config)
    return ParameterCount(
        embeddings=vocabulary * model.hidden_size + _position_parameters(model),
        layers=model.num_layers * sum(_layer_parameters(model)),
        final_norm=_norm_parameters(model, model.hidden_size),
        output=vocabulary * model.hidden_size if model.untie_embeddings_and_output_weights else 0,
    )


def parameters_per_rank(config: Config) -> list[int]:
    """Parameters that one rank of each pipeline stage holds, padding and tied copies included."""
    model, tensor_size = config.model, config.layout.tensor_model_parallel_size
    sharded, replicated = _layer_parameters(model)
    stages = chunk_layers(config)
    matrix = model.padded_vocab_size * model.hidden_size // tensor_size
    counts = [sum(map(len, chunks)) * (sharded // tensor_size + replicated) for chunks in stages]
    counts[0] += matrix + _position_parameters(model)
    counts[-1] += _norm_parameters(model, model.hidden_size)
    if model.untie_embeddings_and_output_weights or len(stages) > 1:
        counts[-1] += matrix  # the output layer: its own, or the last stage's copy of the word embeddings
    return counts


def flops_per_token(config: Config) -> int:
    """Floating-point operations of forward and backward for one token, recomputation not counted.

    Every weight of a matrix product costs 2 operations forward and 4 backward: 6 x weights, the output layer included
    and the embedding lookup not. Attention adds the products Q K^T and A V over the keys that causality leaves, on
    average S/2 of them: 6 x L x (nh x hd) x S ("causal"). The "full" convention has 12 instead. V is the true
    vocabulary.
    Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B, halved there for causality; Megatron-LM's own
    formula agrees, but counts padded rows.
    """
    model = config.model
    width = model.num_attention_heads * model.kv_channels
    matrices = model.num_layers * _layer_matrix_weights(model) + _vocabulary(config) * model.hidden_size
    return 6 * matrices + 6 * model.num_layers * width * model.seq_length


def state_bytes_per_parameter(config: Config) -> float:
    """Bytes of weights, gradients and optimizer state that a rank holds for each of its parameters.

    Mixed precision with Adam: 2 (weight) + 4 (fp32 gradient) + 12 (fp32 master and two moments) = 18, and 6 + 12/d
    with the distributed optimizer over d data-parallel ranks (Megatron-LM's documentation of its distributed
    optimizer). fp16 without --accumulate-allreduce-grads-in-fp32 has 2-byte gradients. fp32 has no master: 8 + 8,
    or 8 + 8/d. SGD keeps one moment, not two.
    """
    training, layout = config.training, config.layout
    mixed = training.bf16 or training.fp16
    held = 8 if not mixed else 2 + (4 if training.accumulate_allreduce_grads_in_fp32 else 2)
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    shared = 4 * moments + (4 if mixed else 0)
    return held + shared / (layout.data_parallel_size if layout.use_distributed_optimizer else 1)


def _layer_parameters(model: ModelConfig) -> tuple[int, int]:
    """Parameters of one layer that tensor parallelism shards, and those that each rank holds in full."""
    query = model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_key_value_heads * model.kv_channels
    inner = model.ffn_hidden_size * (2 if model.swiglu else 1)
    sharded = _layer_matrix_weights(model)
    replicated = 2 * _norm_parameters(model, model.hidden_size)
    if model.has_qkv_bias:
        sharded += query + key_value
    if not model.disable_bias_linear:
        sharded += inner
        replicated += 2 * model.hidden_size
    if model.qk_layernorm:
        replicated += 2 * _norm_parameters(model, model.kv_channels)
    return sharded, replicated


def _layer_matrix_weights(model: ModelConfig) -> int:
    query = model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_key_value_heads * model.kv_channels
    attention = model.hidden_size * (query + key_value) + query * model.hidden_size
    return attention + model.hidden_size * model.ffn_hidden_size * (3 if model.swiglu else 2)


def _norm_parameters(model: ModelConfig, width: int) -> int:
    return width * (2 if model.normalization == "LayerNorm" else 1)


def _position_parameters(model: ModelConfig) -> int:
    learned = model.position_embedding_type == "learned_absolute"
    return model.max_position_embeddings * model.hidden_size if learned else 0


def _vocabulary(config: Config) -> int:
    return config.data.vocab_size or config.model.padded_vocab_size
