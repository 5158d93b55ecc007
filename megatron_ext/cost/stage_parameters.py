"""Counts the parameters and layers of each stage and chunk, fast enough to ask for a thousand layouts.

The catalogue (`parts/catalogue.py`) of a model with hundreds of experts in a hundred layers is long. Its layers are
of a few kinds (`parts/stack.py`), and the experts of a layer are alike: a layer of each kind with one of them says it
all.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable

from megatron_ext.config.derived.pipeline_split import last_stage
from megatron_ext.config.derived.rank_order import chunk_layers
from megatron_ext.config.schema import Config, DataConfig, ModelConfig
from megatron_ext.parts.catalogue import (
    WORD_EMBEDDINGS,
    Parameter,
    embedding_parameters,
    layer_parameters,
    output_parameters,
)
from megatron_ext.parts.own_parameters import OwnParameters, with_own_parameters
from megatron_ext.parts.stack import Layer, Stack, stack


@dataclasses.dataclass(frozen=True)
class ElementCounts:
    """The elements of one part of the model on one rank."""

    dense: int
    experts: int
    norms: int
    """Number of elements of norms and biases among them, and of projections and routers that every rank has whole."""

    mixer: int
    """Number of elements of the mixer's matrices."""

    mlp: int
    """Number of elements of the matrices that every token passes after attention: MLP, shared experts, router."""

    largest: int
    """Number of elements of the largest matrix."""

    def __add__(self, other: "ElementCounts") -> "ElementCounts":
        return ElementCounts(
            self.dense + other.dense,
            self.experts + other.experts,
            self.norms + other.norms,
            self.mixer + other.mixer,
            self.mlp + other.mlp,
            max(self.largest, other.largest),
        )


class Shapes:
    """The parameters that a rank of each stage and chunk holds, of a resolved and validated configuration."""

    def __init__(self, config: Config):
        held = chunk_layers(config)
        self.counts = [[len(layers) for layers in stage] for stage in held]
        self.last = last_stage(config.layout)
        """The stage with the loss."""
        self.whole = stack(config)
        """All layers."""
        self.stacks = [[self.whole[layers.start : layers.stop] for layers in stage] for stage in held]
        """The layers of every chunk, `[stage][chunk]`."""
        self._sums: dict[Stack, tuple[int, int]] = {}
        self._of_stages: dict[int, tuple[int, int]] = {}
        self._layer_sizes: dict[int, list[int]] = {}
        self._kinds: dict[int, Counter[Layer]] = {}
        self._kinds_of_chunks: dict[int, tuple[list[tuple[Stack, bool, bool]], list[int]]] = {}
        self._alike: list[int] | None = None
        self._heaviest: list[int] | None = None
        self.shared = config.model.shares_word_embeddings
        layout = config.layout
        self.embedding, self.table, self.layers, self.output = _parts(
            config.model,
            config.data,
            layout.tensor_model_parallel_size,
            layout.expert_tensor_size,
            layout.expert_model_parallel_size,
            getattr(config, "own_parameters", None),
        )

    def representatives(self) -> list[int]:
        """Return the first stage of each kind, for every stage that has the same contents."""
        if self._alike is None:
            last = self.last
            contents = [
                ([chunk.kinds for chunk in chunks], stage == 0, stage == last)
                for stage, chunks in enumerate(self.stacks)
            ]
            self._alike = [contents.index(content) for content in contents]
        return self._alike

    def heaviest(self) -> list[int]:
        """Return the same, with the first stage also for those between the ends that hold its layers: it has the
        embedding on top, and most microbatches in flight, so that none of them needs or takes more."""
        if self._heaviest is None:
            first, last = [chunk.kinds for chunk in self.stacks[0]], self.last
            self._heaviest = [
                0 if stage != last and [chunk.kinds for chunk in self.stacks[stage]] == first else stage
                for stage in self.representatives()
            ]
        return self._heaviest

    @functools.cached_property
    def kinds_of_stages(self) -> list[int]:
        """The stages that `heaviest` names, each once."""
        return sorted(set(self.heaviest()))

    def kinds_of_chunks(self, stage: int) -> tuple[list[tuple[Stack, bool, bool]], list[int]]:
        """Return every kind of chunk that a stage has (its layers, whether it has the embedding, and the loss), and of
        which kind each of its chunks is."""
        if stage not in self._kinds_of_chunks:
            places: dict[tuple[object, bool, bool], int] = {}
            kinds, chunks = [], []
            for chunk, layers in enumerate(self.stacks[stage]):
                first, last = self.is_first(stage, chunk), self.is_last(stage, chunk)
                index = places.setdefault((layers.kinds, first, last), len(kinds))
                if index == len(kinds):
                    kinds.append((layers, first, last))
                chunks.append(index)
            self._kinds_of_chunks[stage] = kinds, chunks
        return self._kinds_of_chunks[stage]

    def part(self, layer: Layer) -> ElementCounts:
        """Return the elements that a rank holds of a layer."""
        return self.layers[layer]

    @functools.cached_property
    def largest_layer(self) -> int:
        """Elements that a rank holds of the largest layer of the model."""
        return max(part.dense + part.experts for part in self.layers.values())

    def layer_sizes(self, stage: int) -> list[int]:
        """Return the elements that a rank of this stage holds of each of its layers, the largest first."""
        if stage not in self._layer_sizes:
            sizes = {kind: part.dense + part.experts for kind, part in self.layers.items()}
            each = (sizes[kind] for chunk in self.stacks[stage] for kind, number in chunk.kinds for _ in range(number))
            self._layer_sizes[stage] = sorted(each, reverse=True)
        return self._layer_sizes[stage]

    def kinds_of_stage(self, stage: int) -> Counter[Layer]:
        """Return how many layers of each kind a stage has."""
        if stage not in self._kinds:
            self._kinds[stage] = kinds_of(self.stacks[stage])
        return self._kinds[stage]

    def layers_of_stage(self, stage: int) -> int:
        """Return the layers of a stage."""
        return sum(self.counts[stage])

    def parameters_of_stage(self, stage: int) -> tuple[int, int]:
        """Return the parameters of a rank of this stage: outside of routed experts, and in routed experts."""
        if stage not in self._of_stages:
            of_chunks = [self.parameters_of_chunk(stage, chunk) for chunk in range(len(self.counts[stage]))]
            dense = sum(part[0] for part in of_chunks)
            if self.shared and len(self.counts) == 1:
                dense -= self.table  # one matrix serves both ends
            self._of_stages[stage] = dense, sum(part[1] for part in of_chunks)
        return self._of_stages[stage]

    def parameters_of_chunk(self, stage: int, chunk: int) -> tuple[int, int]:
        """Return the parameters of a rank in one chunk: outside of routed experts, and in routed experts. A shared
        embedding counts in both end chunks."""
        dense, experts = self._of_layers(self.stacks[stage][chunk])
        if self.is_first(stage, chunk):
            dense += self.embedding.dense
        if self.is_last(stage, chunk):
            dense += self.output.dense + (self.table if self.shared else 0)
        return dense, experts

    def _of_layers(self, stack: Stack) -> tuple[int, int]:
        elements = self._sums.get(stack)
        if elements is None:
            parts = [(self.layers[kind], number) for kind, number in stack.kinds]
            dense = sum(number * part.dense for part, number in parts)
            elements = self._sums[stack] = dense, sum(number * part.experts for part, number in parts)
        return elements

    def norms_of_stage(self, stage: int) -> int:
        """Return the weights of a rank of this stage whose gradients tensor-parallel ranks add: norms, and others."""
        last = self.is_last(stage, len(self.counts[stage]) - 1)
        norms = sum(number * self.layers[kind].norms for chunk in self.stacks[stage] for kind, number in chunk.kinds)
        return norms + (self.output.norms if last else 0)

    def is_first(self, stage: int, chunk: int) -> bool:
        """Return whether this chunk has the embedding."""
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Return whether this chunk has the output layer and the loss."""
        return stage == self.last and chunk == len(self.counts[stage]) - 1


def kinds_of(stacks: Iterable[Stack]) -> Counter[Layer]:
    """Return how many layers of each kind there are in several chunks."""
    kinds: Counter[Layer] = Counter()
    for chunk in stacks:
        kinds.update(dict(chunk.kinds))
    return kinds


@functools.lru_cache(maxsize=64)
def _parts(
    model: ModelConfig,
    data: DataConfig,
    tensor: int,
    expert_tensor: int,
    expert_ranks: int,
    own: OwnParameters | None,
) -> tuple[ElementCounts, int, dict[Layer, ElementCounts], ElementCounts]:
    """Return the elements of the embedding, of the word embeddings in it, of a layer of each kind, and of the output
    (final norm and output layer).

    Args:
        own: lists the parameters of own layers.
    """
    config = with_own_parameters(Config(model=model, data=data), own)

    def held(parameters: Iterable[Parameter], experts: int = 0) -> ElementCounts:
        parts = (_part(parameter, tensor, expert_tensor, experts, expert_ranks) for parameter in parameters)
        return sum(parts, ElementCounts(0, 0, 0, 0, 0, 0))

    embedding, output = list(embedding_parameters(config)), list(output_parameters(config))
    layers = {
        kind: held(layer_parameters(config, kind, experts=[0]), kind.experts.count if kind.experts else 0)
        for kind, _ in stack(config).kinds
    }
    [table] = (math.prod(p.local_shape(tensor)) for p in embedding if p.name == WORD_EMBEDDINGS)
    return held(embedding), table, layers, held(output)


def _part(parameter: Parameter, tensor: int, expert_tensor: int, experts: int, expert_ranks: int) -> ElementCounts:
    """Return the elements that a rank holds of a parameter; of a routed expert's parameter, of the same one in all
    `experts` of the layer."""
    routed = parameter.expert is not None
    elements = math.prod(parameter.local_shape(expert_tensor if routed else tensor))
    matrix = elements if len(parameter.shape) > 1 else 0
    if routed:
        return ElementCounts(0, elements * experts // expert_ranks, 0, 0, 0, matrix)
    if parameter.sequence_parallel and matrix:
        # Whole on every rank of tensor parallelism, which divides its tokens instead.
        # Their gradients are added over the ranks as norms' gradients are.
        if ".self_attention." in parameter.name:
            return ElementCounts(elements, 0, elements, matrix // tensor, 0, matrix)
        return ElementCounts(elements, 0, elements, 0, matrix // tensor, 0)
    mixer = matrix if ".self_attention." in parameter.name else 0
    norm = elements if parameter.sequence_parallel or "layernorm" in parameter.name else 0
    return ElementCounts(elements, 0, norm, mixer, matrix - mixer, matrix)
