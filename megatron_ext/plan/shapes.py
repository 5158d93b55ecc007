"""How many parameters and layers each stage and chunk has, fast enough to ask for a thousand layouts.

The catalogue (`config/parameters.py`) of a model with hundreds of experts in a hundred layers is long. Its layers are
alike, and so are the experts of a layer: one layer with one of them says it all.
"""

import dataclasses
import functools
import math

from megatron_ext.config.parameters import WORD_EMBEDDINGS, parameters
from megatron_ext.config.pipeline import layer_counts
from megatron_ext.config.schema import Config, DataConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements of one part of the model on one rank."""

    dense: int
    experts: int
    norms: int
    """Those of norms among them."""

    attention: int
    """Those of the matrices of attention."""

    mlp: int
    """Those of the matrices that every token passes after it: MLP, shared experts, router."""

    largest: int
    """Those of the largest matrix."""

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.dense + other.dense,
            self.experts + other.experts,
            self.norms + other.norms,
            self.attention + other.attention,
            self.mlp + other.mlp,
            max(self.largest, other.largest),
        )


class Shapes:
    """The parameters that a rank of each stage and chunk holds, of a resolved and validated configuration."""

    def __init__(self, config: Config):
        self.counts = layer_counts(config)
        self.tied = not config.model.untie_embeddings_and_output_weights
        layout = config.layout
        self.embedding, self.table, self.layer, self.output = _parts(
            config.model,
            config.data,
            layout.tensor_model_parallel_size,
            layout.expert_tensor_size,
            layout.expert_model_parallel_size,
        )

    def representatives(self) -> list[int]:
        """For every stage the first one with the same contents."""
        last = len(self.counts) - 1
        contents = [(counts, stage == 0, stage == last) for stage, counts in enumerate(self.counts)]
        return [contents.index(held) for held in contents]

    def layers_of_stage(self, stage: int) -> int:
        return sum(self.counts[stage])

    def parameters_of_stage(self, stage: int) -> tuple[int, int]:
        """Parameters of a rank of this stage: of routed experts, and before that of everything else."""
        held = [self.parameters_of_chunk(stage, chunk) for chunk in range(len(self.counts[stage]))]
        dense = sum(part[0] for part in held)
        if self.tied and len(self.counts) == 1:
            dense -= self.table  # one matrix serves both ends
        return dense, sum(part[1] for part in held)

    def parameters_of_chunk(self, stage: int, chunk: int) -> tuple[int, int]:
        """The same of one chunk; a tied embedding counts where it is looked up and where it is multiplied."""
        layers = self.counts[stage][chunk]
        dense = layers * self.layer.dense
        if self.is_first(stage, chunk):
            dense += self.embedding.dense
        if self.is_last(stage, chunk):
            dense += self.output.dense + (self.table if self.tied else 0)
        return dense, layers * self.layer.experts

    def norms_of_stage(self, stage: int) -> int:
        last = self.is_last(stage, len(self.counts[stage]) - 1)
        return self.layers_of_stage(stage) * self.layer.norms + (self.output.norms if last else 0)

    def is_first(self, stage: int, chunk: int) -> bool:
        """Whether this chunk has the embedding."""
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Whether this chunk has the output layer and the loss."""
        return stage == len(self.counts) - 1 and chunk == len(self.counts[stage]) - 1


@functools.lru_cache(maxsize=64)
def _parts(
    model: ModelConfig, data: DataConfig, tensor: int, expert_tensor: int, expert_ranks: int
) -> tuple[Part, int, Part, Part]:
    """Embedding, the word embeddings in it, one layer, and what follows the layers."""
    experts = model.num_experts or 0
    one = dataclasses.replace(model, num_layers=1, num_experts=1 if experts else None)
    found: dict[object, Part] = {}
    table = 0
    for parameter in parameters(Config(model=one, data=data)):
        routed = parameter.expert is not None
        held = math.prod(parameter.local_shape(expert_tensor if routed else tensor))
        matrix = held if len(parameter.shape) > 1 else 0
        if parameter.name == WORD_EMBEDDINGS:
            table = held
        if routed:
            part = Part(0, held * experts // expert_ranks, 0, 0, 0, matrix)
        elif "router" in parameter.name:
            # Whole on every rank of tensor parallelism, which divides its tokens instead.
            part = Part(held * experts, 0, 0, 0, matrix * experts // tensor, 0)
        else:
            attention = matrix if ".self_attention." in parameter.name else 0
            norm = held if "layernorm" in parameter.name else 0
            part = Part(held, 0, norm, attention, matrix - attention, matrix)
        before = found.get(parameter.stage, Part(0, 0, 0, 0, 0, 0))
        found[parameter.stage] = before + part
    return found["embedding"], table, found[0], found["output"]
