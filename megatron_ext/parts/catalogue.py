"""The catalogue lists every parameter of the model that a configuration describes, without building it.

    for parameter in parameters(config):
        print(parameter.name, parameter.shape, parameter.tp_dim)

It is the one truth for initialization, `--dry-run`, parity, planning and conversion.
`tests/distributed/test_catalogue.py` holds it against the model that megatron-core builds, in every layout.

A global name is megatron-core's own name with the layer's index in the whole model, e.g.
`decoder.layers.17.self_attention.linear_qkv.weight`.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from megatron_ext.config.derived.pipeline_split import last_stage
from megatron_ext.config.derived.rank_order import chunk_layers
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts import own_parameters
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Place, State, matrix_init
from megatron_ext.parts.stack import Branch, Layer, final_norm, layers, residual_std, stack

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
EMBEDDING_NORM = "embedding.word_embeddings_norm"


def parameters(config: Config) -> list[Parameter]:
    """Return every parameter of the model, in the order of a forward pass. Tied weights appear once."""
    of_layers = (parameter for layer in layers(config) for parameter in layer_parameters(config, layer))
    return [*embedding_parameters(config), *of_layers, *output_parameters(config)]


def count(config: Config) -> int:
    """Return the number of parameters of the whole model, vocabulary padding included, tied weights counted once."""
    return sum(number * parameter.size for parameter, number in kinds_of_parameters(config))


def vocabulary_padding(config: Config) -> int:
    """Return the number of parameters, of `count`, in the padding rows of the vocabulary."""
    matrices = 2 if config.model.untie_embeddings_and_output_weights else 1
    return (config.model.padded_vocab_size - config.data.vocab_size) * config.model.hidden_size * matrices


def kinds_of_parameters(config: Config) -> Iterator[tuple[Parameter, int]]:
    """Yield parameters that stand for the whole model, each with the number of parameters like it: one layer stands for
    its kind, and one expert for its layer's experts. A model of many layers and experts has millions of parameters."""
    for parameter in _of_no_layer(config):
        yield parameter, 1
    for kind, number in stack(config).kinds:
        experts = 1 if kind.experts is None else kind.experts.count
        for parameter in layer_parameters(config, kind, experts=(0,)):
            yield parameter, number if parameter.expert is None else number * experts


def active_kinds_of_parameters(config: Config) -> Iterator[tuple[Parameter, int]]:
    """Yield the same for the parameters that compute one token: of a layer's experts, which are of one size, the top
    k."""
    kinds = {kind.number: kind.experts for kind, _ in stack(config).kinds}
    for parameter, number in kinds_of_parameters(config):
        experts = kinds.get(parameter.stage) if isinstance(parameter.stage, int) else None
        if parameter.expert is None or experts is None:
            yield parameter, number
        else:
            yield parameter, number // experts.count * min(experts.top_k, experts.count)


def _of_no_layer(config: Config) -> list[Parameter]:
    return [*embedding_parameters(config), *output_parameters(config)]


def _sizes(config: Config, kind: Layer, *, local: bool = False) -> tuple[int, int]:
    """Return the elements of a layer of this kind without its routed experts, and the elements of all its routed
    experts; of the whole model, or `local`ly on one of the ranks that share its matrices.

    One expert is listed for all: a model of many layers and experts has millions of parameters.
    """
    dense = routed = 0
    for parameter in layer_parameters(config, kind, experts=(0,)):
        size = math.prod(parameter.local_shape(tensor_size(config, parameter))) if local else parameter.size
        if parameter.expert is None:
            dense += size
        else:
            routed += size
    return dense, routed * (kind.experts.count if kind.experts is not None else 0)


def stages(config: Config, parameter: Parameter) -> list[int]:
    """Return the pipeline stages that hold `parameter`: one, but for word embeddings that the first and the last stage
    both need; where one stage has both ends of the model, it holds them twice."""
    pipeline_size, last = config.layout.pipeline_model_parallel_size, last_stage(config.layout)
    if parameter.stage == "output":
        return [last]
    if parameter.stage == "embedding":
        shared = parameter.name == WORD_EMBEDDINGS and config.model.shares_word_embeddings
        return [0, last] if shared and pipeline_size > 1 else [0]
    return [_stage_of_layer(config)[parameter.stage]]


@functools.lru_cache(maxsize=8)
def _stage_of_layer(config: Config) -> list[int]:
    """Return the pipeline stage of every layer of the model."""
    held = chunk_layers(config)
    found = {layer: stage for stage, chunks in enumerate(held) for chunk in chunks for layer in chunk}
    return [found[layer.number] for layer in layers(config)]


def count_per_stage(config: Config) -> list[int]:
    """Return the number of parameters on each pipeline stage, summed over its tensor-parallel shards.

    Word embeddings that are tied across stages count on both, and replicated parameters once per stage.
    """
    return [sum(counts) for counts in _per_stage(config, local=False)]


def count_per_rank(config: Config, *, experts: bool | None = None) -> list[int]:
    """Return the number of elements that one rank of each pipeline stage holds; of routed experts alone, or without
    them."""
    ranks = config.layout.expert_model_parallel_size
    counts = [(dense, routed // ranks) for dense, routed in _per_stage(config, local=True)]
    return [sum(both) if experts is None else both[experts] for both in counts]


def _per_stage(config: Config, *, local: bool) -> list[tuple[int, int]]:
    """Return `_sizes` summed over the parameters of each pipeline stage."""
    dense, routed = ([0] * config.layout.pipeline_model_parallel_size for _ in range(2))
    for parameter in _of_no_layer(config):
        for stage in stages(config, parameter):
            size = math.prod(parameter.local_shape(tensor_size(config, parameter))) if local else parameter.size
            dense[stage] += size
    sizes = {kind: _sizes(config, kind, local=local) for kind, _ in stack(config).kinds}
    for layer, stage in zip(layers(config), _stage_of_layer(config), strict=True):
        dense[stage] += sizes[layer][0]
        routed[stage] += sizes[layer][1]
    return list(zip(dense, routed, strict=True))


def tensor_size(config: Config, parameter: Parameter) -> int:
    """Return the number of ranks that share the matrices of the part of the model that `parameter` belongs to."""
    layout = config.layout
    return layout.tensor_model_parallel_size if parameter.expert is None else layout.expert_tensor_size


def embedding_parameters(config: Config) -> Iterator[Parameter]:
    """Yield the parameters before the first layer."""
    model = config.model
    shape = (model.padded_vocab_size, model.hidden_size)
    yield Parameter(
        WORD_EMBEDDINGS,
        shape,
        "embedding",
        *_embedding_init(model, _true_shape(config)),
        tp_dim=0,
        true_rows=_true_rows(config),
    )
    learned = model.position_embedding_type == "learned_absolute"
    if model.embed_layernorm:
        place = Place(EMBEDDING_NORM, "embedding", model, residual_std(config))
        for parameter in final_norm(model).parameters(place, model.hidden_size):
            # With learned positions megatron-core divides the sequence after their sum.
            yield replace(parameter, sequence_parallel=not learned)
    if learned:
        shape = (model.position_embedding_offset + model.max_position_embeddings, model.hidden_size)
        yield Parameter(POSITION_EMBEDDINGS, shape, "embedding", *_embedding_init(model, shape))


def layer_parameters(config: Config, layer: Layer, experts: Iterable[int] | None = None) -> Iterator[Parameter]:
    """Yield the parameters of one layer; none where they are those of another one.

    Args:
        experts: the routed experts to name, in place of all of the layer's.
    """
    if layer.repeats:
        return
    if layer.around is not None:
        yield from layer.around.parameters(_place(config, layer))
    for branch in layer.branches:
        yield from branch_parameters(config, layer, branch, experts)
    yield from own_parameters.of_layer(config, layer)


def branch_parameters(
    config: Config, layer: Layer, branch: Branch, experts: Iterable[int] | None = None
) -> Iterator[Parameter]:
    """Yield the parameters of one branch of a layer, and of its norms."""
    place, width = _place(config, layer, experts), config.model.hidden_size
    if branch.before is not None:
        yield from layer.norm.parameters(place.inside(branch.before), width)
    yield from branch.part.parameters(place.inside(branch.name))
    if branch.after is not None:
        yield from layer.norm.parameters(place.inside(branch.after), width)


def states(config: Config) -> Iterator[State]:
    """Yield the state that the layers keep and save besides parameters, in the order of a forward pass."""
    for layer in layers(config):
        if layer.repeats:
            continue
        if layer.around is not None:
            yield from layer.around.state(_place(config, layer))
        for branch in layer.branches:
            yield from branch.part.state(_place(config, layer).inside(branch.name))


def _place(config: Config, layer: Layer, experts: Iterable[int] | None = None) -> Place:
    return Place(layer.name, layer.number, config.model, residual_std(config), experts)


def output_parameters(config: Config) -> Iterator[Parameter]:
    """Yield the parameters after the last layer, without tied word embeddings."""
    model = config.model
    place = Place("decoder.final_layernorm", "output", model, residual_std(config))
    yield from final_norm(model).parameters(place, model.hidden_size)
    if model.untie_embeddings_and_output_weights:
        shape = (model.padded_vocab_size, model.hidden_size)
        yield Parameter(
            OUTPUT_LAYER,
            shape,
            "output",
            *matrix_init(model, _true_shape(config), model.init_method_std),
            tp_dim=0,
            true_rows=_true_rows(config),
        )
    if model.lm_head_bias:
        shape = (model.padded_vocab_size,)
        yield Parameter("output_layer.bias", shape, "output", "zeros", tp_dim=0, true_rows=_true_rows(config))


def _embedding_init(model: ModelConfig, shape: tuple[int, int]) -> tuple[Literal["normal", "uniform"], float]:
    """Return the initialization of an embedding: as a matrix's, unless --embedding-init-method-std says otherwise."""
    std, usual = model.embedding_init_method_std, model.init_method_std
    return matrix_init(model, shape, usual) if std in (None, usual) else ("normal", std)


def _true_shape(config: Config) -> tuple[int, int]:
    """Return the shape of a matrix over the vocabulary by which it begins: without padding, which layouts differ in."""
    return config.data.vocab_size or config.model.padded_vocab_size, config.model.hidden_size


def _true_rows(config: Config) -> int | None:
    """Return the entries of the vocabulary, where there is padding after them."""
    vocab_size = config.data.vocab_size
    assert vocab_size is not None, "the vocabulary's size is known once the configuration is resolved"
    return vocab_size if vocab_size < config.model.padded_vocab_size else None
