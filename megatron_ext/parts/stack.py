"""Describes what every layer of the model is: the one description, which everything else reads.

    for layer in layers(config):
        print(layer.number, layer.attention.window, layer.mlp)

The catalogue, the layer spec, FLOPs, activations, traffic, the families of Hugging Face, `--dry-run` and the planner
sum over these layers; none of them takes one layer times their number. A new kind of layer is its operation (in
`model/`), its line in `_layer`, and its entries in the catalogue (`parts/catalogue.py`).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_ext.config.schema import Config, ModelConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "squared_relu"]


@dataclass(frozen=True)
class Norm:
    """A normalization of the last dimension."""

    kind: Literal["LayerNorm", "RMSNorm"]
    epsilon: float

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""
        return self.kind == "LayerNorm"


@dataclass(frozen=True)
class RotaryScaling:
    """Says how the rotary frequencies are stretched, as Llama 3.1 does it (see
    `parts.attention.rope.scaled_inverse_frequencies`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Rotary:
    """Says how queries and keys are rotated by their position."""

    base: float
    percent: float
    """Share of a head's channels that is rotated."""

    scaling: RotaryScaling | None

    def channels(self, head_size: int) -> int:
        """Return the number of rotated channels of a head."""
        return int(head_size * self.percent)


@dataclass(frozen=True)
class Attention:
    """Causal self-attention, whose query heads share key/value heads group by group. Sizes are of the whole model."""

    kind: Literal["grouped_query"]
    """How queries, keys and values come about; multi-head attention is that of one query head a group."""

    query_heads: int
    groups: int
    """Number of key/value heads."""

    head_size: int
    """Channels of a query head and of a key head, which are multiplied with each other."""

    value_head_size: int
    """Channels of a value head, and of the context that a query head gets."""

    window: int | None
    """Number of latest positions that a query sees, its own included; None: all up to its own."""

    rotary: Rotary | None
    qk_norm: Literal["head", "projection"] | None
    """Whether queries and keys are normalized, head by head or all heads of a token at once."""

    qkv_bias: bool
    output_bias: bool

    @property
    def qk_norm_sizes(self) -> tuple[int, int] | None:
        """Channels that are normalized together: of queries, and of keys. None without these norms."""
        if self.qk_norm is None:
            return None
        return (self.head_size, self.head_size) if self.qk_norm == "head" else (self.query_size, self.key_size)

    @property
    def query_size(self) -> int:
        """Number of channels of all query heads."""
        return self.query_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Number of channels of all key heads."""
        return self.groups * self.head_size

    @property
    def value_size(self) -> int:
        """Number of channels of all value heads."""
        return self.groups * self.value_head_size

    @property
    def context_size(self) -> int:
        """Channels of what all query heads attended to: the width of the output projection's input."""
        return self.query_heads * self.value_head_size

    def mean_keys(self, length: int) -> float:
        """Return the number of keys that a query sees on average in a sequence of `length` positions, counted as half
        of it.

        With a window w < length the first w queries see w/2 on average, and those after them w: w - w^2 / (2 length).
        """
        seen = length if self.window is None else min(self.window, length)
        return seen - seen * seen / (2 * length)

    def core_flops(self, length: int) -> float:
        """Return the floating-point operations of Q K^T and A V for one token, forward, a multiply and an add counted
        as two."""
        return 2 * self.query_heads * (self.head_size + self.value_head_size) * self.mean_keys(length)


@dataclass(frozen=True)
class Mlp:
    """Two matrices with an activation between them."""

    gated: bool
    """The first matrix has two halves, of which the activation of one multiplies the other."""

    activation: Activation
    width: int
    bias: bool


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, which takes the place of an MLP."""

    count: int
    top_k: int
    """Number of experts that compute each token."""

    mlp: Mlp
    """What each of them is."""

    shared: Mlp | None
    """What computes every token next to them: the shared experts together."""


@dataclass(frozen=True)
class Layer:
    """One transformer layer. Two layers are equal where they are of one kind, whatever their numbers."""

    number: int = field(compare=False)
    """Index in the whole model, from 0."""

    attention: Attention
    mlp: Mlp | Experts
    norm: Norm
    """What every norm of the layer is."""

    norm_places: Literal["before", "after", "both"]
    """Whether norms stand before attention and MLP (on what they take in), after them (on what they give, before it is
    added to the residual stream), or on both sides."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Once a layer: the planner looks layers up some hundred times for each of thousands of layouts.
        return hash((self.attention, self.mlp, self.norm, self.norm_places))

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts, or None in a layer with an MLP."""
        return self.mlp if isinstance(self.mlp, Experts) else None

    @property
    def every_token(self) -> Mlp | None:
        """The MLP that computes every token: the layer's own, or the shared experts; None without either."""
        return self.mlp.shared if isinstance(self.mlp, Experts) else self.mlp

    @property
    def inner(self) -> Mlp:
        """The layer's MLP, or that of one of its experts."""
        return self.mlp.mlp if isinstance(self.mlp, Experts) else self.mlp

    @property
    def norms_before(self) -> bool:
        """Whether norms stand before attention and MLP."""
        return self.norm_places != "after"

    @property
    def norms_after(self) -> bool:
        """Whether norms stand after attention and MLP."""
        return self.norm_places != "before"

    @property
    def norm_count(self) -> int:
        """Number of norms of the width of the residual stream."""
        return 2 * (self.norms_before + self.norms_after)


class Stack:
    """Consecutive layers of the model, such as all of them, or those of a pipeline stage's chunk.

    A sum over its layers computes each kind of layer once.
    """

    def __init__(self, layers: tuple[Layer, ...], kinds: tuple[Layer, ...] | None = None):
        self._layers = layers
        first: dict[Layer, Layer] = {}
        # One object for each kind, the same in all slices, so that looking it up compares nothing.
        self._kinds = tuple(first.setdefault(layer, layer) for layer in layers) if kinds is None else kinds
        self._slices: dict[tuple[int | None, int | None], Stack] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def __getitem__(self, part: slice) -> "Stack":
        """Return some of the layers; the same object each time."""
        assert part.step is None
        found = self._slices.get((part.start, part.stop))
        if found is None:
            found = self._slices[part.start, part.stop] = Stack(self._layers[part], self._kinds[part])
        return found

    @functools.cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """The model's first layer of every kind that is among these, in their order, and the number of its like."""
        return tuple(Counter(self._kinds).items())

    def total(self, of: Callable[[Layer], float]) -> float:
        """Return the sum of `of` over the layers."""
        return sum((number * of(kind) for kind, number in self.kinds), 0.0)

    def count(self, where: Callable[[Layer], object]) -> int:
        """Return the number of layers for which `where` holds."""
        return sum(number for kind, number in self.kinds if where(kind))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the description of every layer of the model, in the order of a forward pass."""
    return tuple(stack(config))


def stack(config: Config) -> Stack:
    """Return the same as a stack, of which a chunk is a slice."""
    return _stack(config.model)


@functools.lru_cache(maxsize=64)
def _stack(model: ModelConfig) -> Stack:
    return Stack(tuple(_layer(model, number) for number in range(model.num_layers)))


def _layer(model: ModelConfig, number: int) -> Layer:
    """Return layer `number` of the model: where kinds of layers are dealt out. All are alike today."""
    return Layer(
        number=number,
        attention=_attention(model),
        mlp=_mlp(model, model.ffn_hidden_size) if model.num_experts is None else _experts(model, model.num_experts),
        norm=final_norm(model),
        norm_places=model.norm_position,  # pyright: ignore[reportArgumentType]
    )


def final_norm(model: ModelConfig) -> Norm:
    """Return the norm after the last layer, and of the layers themselves."""
    return Norm(model.normalization, model.norm_epsilon)  # pyright: ignore[reportArgumentType]


def _attention(model: ModelConfig) -> Attention:
    return Attention(
        kind="grouped_query",
        query_heads=model.num_attention_heads,
        groups=model.num_key_value_heads,
        head_size=model.kv_channels,
        value_head_size=model.kv_channels,
        window=None,
        rotary=_rotary(model),
        qk_norm=model.qk_layernorm_over if model.qk_layernorm else None,  # pyright: ignore[reportArgumentType]
        qkv_bias=model.has_qkv_bias,
        output_bias=not model.disable_bias_linear,
    )


def _rotary(model: ModelConfig) -> Rotary | None:
    if model.position_embedding_type != "rope":
        return None
    scaling = RotaryScaling(
        model.rope_scaling_factor,
        model.rope_scaling_low_freq_factor,
        model.rope_scaling_high_freq_factor,
        model.rope_scaling_original_max_position_embeddings,
    )
    return Rotary(model.rotary_base, model.rotary_percent, scaling if model.use_rope_scaling else None)


def _mlp(model: ModelConfig, width: int) -> Mlp:
    return Mlp(model.swiglu, _activation(model), width, bias=not model.disable_bias_linear)


def _experts(model: ModelConfig, count: int) -> Experts:
    shared = model.moe_shared_expert_intermediate_size
    return Experts(
        count=count,
        top_k=model.moe_router_topk,
        mlp=_mlp(model, model.expert_ffn_hidden_size),
        shared=None if shared is None else _mlp(model, shared),
    )


def _activation(model: ModelConfig) -> Activation:
    if model.swiglu:
        return "silu"
    if model.squared_relu:
        return "squared_relu"
    return "gelu_tanh" if model.openai_gelu else "gelu"


def residual_std(config: Config) -> float:
    """Return the standard deviation of the initial weights whose products a layer adds to the residual stream.

    It shrinks with the depth, so that the sum of 2 x layers branches keeps its variance (Radford et al. 2019, "Language
    Models are Unsupervised Multitask Learners", section 2.3).
    """
    return config.model.init_method_std / math.sqrt(2.0 * len(stack(config)))
