"""The catalogue: every parameter of the model that a configuration describes, without building it.

    for parameter in parameters(config):
        print(parameter.name, parameter.shape, parameter.tp_dim)

It is the one truth for initialization, `--dry-run`, parity, planning and conversion.
`tests/distributed/test_catalogue.py` holds it against the model that megatron-core builds, in every layout.

A global name is megatron-core's own name with the layer's index in the whole model, e.g.
`decoder.layers.17.self_attention.linear_qkv.weight`.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_ext.config.layout import chunk_layers
from megatron_ext.config.schema import Config

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    """Of the whole model, vocabulary padding included."""

    stage: int | Literal["embedding", "output"]
    """Index of the layer that it belongs to, or the first or last pipeline stage."""

    init: Literal["normal", "ones", "zeros"]
    std: float = 0.0
    """Standard deviation of a normal initialization."""

    tp_dim: int | None = None
    """Dimension that tensor parallelism divides; None when every rank holds the whole."""

    tp_stride: int = 1
    """2 for SwiGLU's first matrix: a rank's shard is its part of the gate above its part of the up projection."""

    true_rows: int | None = None
    """Rows that stand for entries of the vocabulary; those after them are padding, and zero. None: no padding."""

    sequence_parallel: bool = False
    """Whether, under sequence parallelism, each rank sees the gradient of its own tokens only, so that it must be
    summed over the tensor-parallel ranks. (Those of the query and key norms are summed in any case.)"""

    expert: int | None = None
    """Index of the routed expert that it is part of. Its shards lie on the expert-tensor-parallel ranks."""

    @property
    def decay(self) -> bool:
        """Weight decay is for matrices: norms and biases have none."""
        return len(self.shape) > 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def local_shape(self, tensor_model_parallel_size: int) -> tuple[int, ...]:
        """Shape of one tensor-parallel rank's shard."""
        shape = list(self.shape)
        if self.tp_dim is not None:
            shape[self.tp_dim] //= tensor_model_parallel_size
        return tuple(shape)


def parameters(config: Config) -> list[Parameter]:
    """Every parameter of the model, in the order of a forward pass. Tied weights appear once."""
    return [*_embedding(config), *_layers(config), *_output(config)]


def count(config: Config) -> int:
    """Number of parameters of the whole model, vocabulary padding included, tied weights counted once."""
    return sum(parameter.size for parameter in parameters(config))


def stages(config: Config, parameter: Parameter) -> list[int]:
    """Pipeline stages that hold `parameter`: one, but for word embeddings tied across the first and the last stage."""
    pipeline_size = config.layout.pipeline_model_parallel_size
    if parameter.stage == "output":
        return [pipeline_size - 1]
    if parameter.stage == "embedding":
        tied = parameter.name == WORD_EMBEDDINGS and not config.model.untie_embeddings_and_output_weights
        return [0, pipeline_size - 1] if tied and pipeline_size > 1 else [0]
    return [_stage_of_layer(config)[parameter.stage]]


@functools.lru_cache(maxsize=8)
def _stage_of_layer(config: Config) -> list[int]:
    """The pipeline stage of every layer of the model."""
    held = chunk_layers(config)
    found = {layer: stage for stage, chunks in enumerate(held) for chunk in chunks for layer in chunk}
    return [found[layer] for layer in range(config.model.num_layers)]


def count_per_stage(config: Config) -> list[int]:
    """Number of parameters on each pipeline stage, summed over its tensor-parallel shards.

    Word embeddings that are tied across stages count on both, and replicated parameters once per stage.
    """
    counts = [0] * config.layout.pipeline_model_parallel_size
    for parameter in parameters(config):
        for stage in stages(config, parameter):
            counts[stage] += parameter.size
    return counts


def count_per_rank(config: Config, *, experts: bool | None = None) -> list[int]:
    """Number of elements that one rank of each pipeline stage holds; of routed experts alone, or without them."""
    counts = [0] * config.layout.pipeline_model_parallel_size
    expert_counts = [0] * config.layout.pipeline_model_parallel_size
    for parameter in parameters(config):
        routed = parameter.expert is not None
        if experts is not None and experts != routed:
            continue
        for stage in stages(config, parameter):
            held = math.prod(parameter.local_shape(tensor_size(config, parameter)))
            (expert_counts if routed else counts)[stage] += held
    ranks = config.layout.expert_model_parallel_size
    return [count + total // ranks for count, total in zip(counts, expert_counts, strict=True)]


def tensor_size(config: Config, parameter: Parameter) -> int:
    """Ranks that share the matrices of the part of the model that `parameter` belongs to."""
    layout = config.layout
    return layout.tensor_model_parallel_size if parameter.expert is None else layout.expert_tensor_size


def _embedding(config: Config) -> Iterator[Parameter]:
    model = config.model
    yield Parameter(
        WORD_EMBEDDINGS,
        (model.padded_vocab_size, model.hidden_size),
        "embedding",
        "normal",
        model.init_method_std,
        tp_dim=0,
        true_rows=_true_rows(config),
    )
    if model.position_embedding_type == "learned_absolute":
        shape = (model.max_position_embeddings, model.hidden_size)
        yield Parameter(POSITION_EMBEDDINGS, shape, "embedding", "normal", model.init_method_std)


def _layers(config: Config) -> Iterator[Parameter]:
    model = config.model
    hidden, head = model.hidden_size, model.kv_channels
    queries = model.num_attention_heads * head
    qkv = queries + 2 * model.num_key_value_heads * head
    std, residual_std = model.init_method_std, _residual_std(config)
    biases = not model.disable_bias_linear
    for index in range(model.num_layers):
        attention, mlp = f"decoder.layers.{index}.self_attention", f"decoder.layers.{index}.mlp"
        yield from _norm(config, f"decoder.layers.{index}.input_layernorm", index, hidden)
        if biases:
            yield Parameter(f"{attention}.linear_proj.bias", (hidden,), index, "zeros", sequence_parallel=True)
        yield Parameter(f"{attention}.linear_proj.weight", (hidden, queries), index, "normal", residual_std, tp_dim=1)
        yield Parameter(f"{attention}.linear_qkv.weight", (qkv, hidden), index, "normal", std, tp_dim=0)
        if model.has_qkv_bias:
            yield Parameter(f"{attention}.linear_qkv.bias", (qkv,), index, "zeros", tp_dim=0)
        if model.qk_layernorm:
            yield from _norm(config, f"{attention}.q_layernorm", index, head)
            yield from _norm(config, f"{attention}.k_layernorm", index, head)
        yield from _norm(config, f"decoder.layers.{index}.pre_mlp_layernorm", index, hidden)
        if model.num_experts is None:
            yield from _mlp(config, mlp, index, model.ffn_hidden_size)
        else:
            yield from _mixture(config, mlp, index, model.num_experts)


def _mixture(config: Config, mlp: str, index: int, experts: int) -> Iterator[Parameter]:
    model = config.model
    shape = (experts, model.hidden_size)
    yield Parameter(f"{mlp}.router.weight", shape, index, "normal", model.init_method_std, sequence_parallel=True)
    for expert in range(experts):
        yield from _mlp(config, f"{mlp}.experts.{expert}", index, model.expert_ffn_hidden_size, expert)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _mlp(config, f"{mlp}.shared_experts", index, model.moe_shared_expert_intermediate_size)


def _mlp(config: Config, mlp: str, index: int, ffn: int, expert: int | None = None) -> Iterator[Parameter]:
    model = config.model
    hidden, std, residual_std = model.hidden_size, model.init_method_std, _residual_std(config)
    fc1, stride = (2 * ffn, 2) if model.swiglu else (ffn, 1)
    biases = not model.disable_bias_linear
    yield Parameter(
        f"{mlp}.linear_fc1.weight", (fc1, hidden), index, "normal", std, tp_dim=0, tp_stride=stride, expert=expert
    )
    if biases:
        yield Parameter(f"{mlp}.linear_fc1.bias", (fc1,), index, "zeros", tp_dim=0, tp_stride=stride)
    yield Parameter(f"{mlp}.linear_fc2.weight", (hidden, ffn), index, "normal", residual_std, tp_dim=1, expert=expert)
    if biases:
        yield Parameter(f"{mlp}.linear_fc2.bias", (hidden,), index, "zeros", sequence_parallel=True)


def _residual_std(config: Config) -> float:
    """What a layer adds to the residual stream shrinks with the depth, so that the sum of 2 x layers branches keeps
    its variance (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3)."""
    return config.model.init_method_std / math.sqrt(2.0 * config.model.num_layers)


def _output(config: Config) -> Iterator[Parameter]:
    model = config.model
    yield from _norm(config, "decoder.final_layernorm", "output", model.hidden_size)
    if model.untie_embeddings_and_output_weights:
        yield Parameter(
            OUTPUT_LAYER,
            (model.padded_vocab_size, model.hidden_size),
            "output",
            "normal",
            model.init_method_std,
            tp_dim=0,
            true_rows=_true_rows(config),
        )


def _norm(config: Config, name: str, stage: int | Literal["output"], width: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), stage, "ones", sequence_parallel=True)
    if config.model.normalization == "LayerNorm":
        yield Parameter(f"{name}.bias", (width,), stage, "zeros", sequence_parallel=True)


def _true_rows(config: Config) -> int | None:
    """Entries of the vocabulary, where there is padding after them."""
    vocab_size = config.data.vocab_size
    assert vocab_size is not None, "the vocabulary's size is known once the configuration is resolved"
    return vocab_size if vocab_size < config.model.padded_vocab_size else None
