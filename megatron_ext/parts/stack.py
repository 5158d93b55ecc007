"""Describes every layer of the model: the one description, which everything else reads.

    for layer in layers(config):
        print(layer.number, layer.attention.window, layer.mlp)

The catalogue, the layer spec, FLOPs, activations, traffic, the families of Hugging Face, `--dry-run` and the planner
sum over these layers and their parts; none of them takes one layer times their number. A new kind of part is its
folder (`parts/<kind>/`: what it says of itself, and its operation) and its line in `_layer`.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from megatron_ext.config.derived.layer_patterns import EXPERTS, MLP, is_dealt
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.attention.describe import Attention, Rotary, Temperature
from megatron_ext.parts.experts.describe import Experts, experts_of
from megatron_ext.parts.kinds import mixer_of
from megatron_ext.parts.mlp.describe import Mlp, mlp_of
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.protocol import Depth, Number, Part
from megatron_ext.parts.ways import Asked, refusals
from megatron_ext.registry import brought

Table = tuple[Rotary | Temperature, int]
"""Key of the table of angles that a layer reads: how positions change queries and keys, and the channels of a head, of
which a share is rotated."""


class Branch(NamedTuple):
    """One addition to the residual stream x: after(part(before(x))), with the names of its modules."""

    name: str
    part: Part
    before: str | None
    """Name of the norm before it; None without one."""

    after: str | None


@dataclass(frozen=True)
class Layer:
    """One transformer layer. Two layers are equal where they are of one kind, whatever their numbers."""

    number: int = field(compare=False)
    """Index in the whole model, from 0."""

    mixer: Part | None
    """Part that mixes positions; None in a layer of an MLP alone."""

    mlp: Part | None
    """Part that computes each position by itself; None in a layer of a mixer alone."""

    norm: Norm
    """Description of every norm of the layer."""

    norm_places: Literal["before", "after", "both", "around-mlp"]
    """Whether norms stand before mixer and MLP (on their inputs), after them (on their outputs, before these are added
    to the residual stream), on both sides, or before the mixer and on both sides of the MLP."""

    parallel: Literal["one-norm", "two-norms"] | None = None
    """Whether mixer and MLP read the same residual stream, through one norm or each through its own; None: the MLP
    reads the residual stream to which the mixer has added its output."""

    next_token: Depth | None = None
    """Modules around the layer where it is a depth of multi-token prediction; None elsewhere."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Once a layer: the planner looks layers up some hundred times for each of thousands of layouts.
        return hash((self.mixer, self.mlp, self.norm, self.norm_places, self.parallel, self.next_token))

    @property
    def name(self) -> str:
        """Global name of its module."""
        ahead = self.next_token
        if ahead is None:
            return f"decoder.layers.{self.number}"
        single = ahead.place is None
        return f"{ahead.name}.transformer_layer" if single else f"{ahead.name}.mtp_model_layer.layers.{ahead.place}"

    @property
    def around(self) -> Depth | None:
        """The modules around the layers of a depth of multi-token prediction, in the first of these layers."""
        return self.next_token if self.next_token is not None and self.next_token.begins else None

    @property
    def repeats(self) -> bool:
        """Whether it is a layer of the first depth applied once more: its parameters are those of that layer."""
        return self.next_token is not None and self.next_token.repeats

    @functools.cached_property
    def branches(self) -> tuple[Branch, ...]:
        """Additions of the layer to the residual stream, one after another."""
        before, after = self.norms_before, self.normed_after
        of_mlp = None if self.parallel == "one-norm" else "pre_mlp_layernorm"
        pieces = (
            ("self_attention", self.mixer, "input_layernorm", "post_self_attn_layernorm"),
            ("mlp", self.mlp, of_mlp, "post_mlp_layernorm"),
        )
        return tuple(
            Branch(name, part, first if before else None, last if name in after else None)
            for name, part, first, last in pieces
            if part is not None
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its parts, and the modules around it."""
        around = () if self.around is None else (self.around,)
        return (*around, *(branch.part for branch in self.branches))

    @property
    def has_attention(self) -> bool:
        """Whether its mixer is attention."""
        return isinstance(self.mixer, Attention)

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that has attention."""
        assert isinstance(self.mixer, Attention), f"layer {self.number} has no attention"
        return self.mixer

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts, or None in a layer without one."""
        return self.mlp if isinstance(self.mlp, Experts) else None

    @property
    def inner(self) -> Mlp | None:
        """The layer's MLP, or the MLP of one of its experts."""
        inner = self.mlp.mlp if isinstance(self.mlp, Experts) else self.mlp
        return inner if isinstance(inner, Mlp) else None

    @property
    def rotary_table(self) -> Table | None:
        """Key of the table of angles that the layer reads; None where it reads none."""
        if not isinstance(self.mixer, Attention) or self.mixer.positions is None:
            return None
        return self.mixer.positions, self.mixer.rotary_size

    @property
    def additions(self) -> int:
        """Number of its additions to the residual stream."""
        return 1 if self.parallel else len(self.branches)

    @property
    def blocks(self) -> int:
        """Number of times that tensor-parallel ranks gather an input and scatter an output."""
        return sum(branch.part.blocks for branch in self.branches)

    @property
    def norms_before(self) -> bool:
        """Whether norms stand before mixer and MLP."""
        return self.norm_places != "after"

    @property
    def norms_after(self) -> bool:
        """Whether norms stand after mixer and MLP, or after one of them."""
        return self.norm_places != "before"

    @property
    def normed_after(self) -> tuple[str, ...]:
        """Names of the modules, mixer and MLP, whose outputs are normalized."""
        return {"before": (), "around-mlp": ("mlp",)}.get(self.norm_places, ("self_attention", "mlp"))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that hold its parameters, in the order of a forward pass."""
        every = ((branch.before, *branch.part.modules, branch.after) for branch in self.branches)
        return tuple(name for names in every for name in names if name is not None)

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the pieces that the layer asks for and that not every way of computing it has (`parts/ways.py`)."""
        asked = Asked(f"--norm-position is {config.model.norm_position}", "--norm-position before")
        places = {"norms after": self.norms_after, "no norms before": not self.norms_before}
        pieces = {place: asked for place, is_so in places.items() if is_so}
        if self.parallel:
            pieces["parallel"] = Asked(f"--parallel-residual is {self.parallel}")
        for part in self.parts:
            pieces |= part.pieces(config)
        return pieces

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield why this configuration cannot compute it, each with a setting that works."""
        yield from refusals(config, self.pieces(config))
        for part in self.parts:
            reasons = part.cannot(config)
            yield from [reasons] if isinstance(reasons, str) else reasons  # one that somebody's own part returns

    def core_flops(self, length: int) -> float:
        """Return the floating-point operations of one token, forward, besides products with weights."""
        return sum(branch.part.core_flops(length) for branch in self.branches)


class Stack:
    """Consecutive layers of the model, such as all of them, or the layers of a pipeline stage's chunk.

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

    @property
    def has_mixed_parameters(self) -> bool:
        """Whether layers differ in their parameters, with experts or an MLP, in mixers, groups or sinks: a checkpoint
        then holds each layer by itself, and otherwise the same parameter of all as one tensor."""
        decoder = [layer for layer, _ in self.kinds if layer.next_token is None]
        attentions = (layer.mixer if isinstance(layer.mixer, Attention) else None for layer in decoder)
        of_attention = [one and (one.groups, one.softmax.sink) for one in attentions]
        kinds = ((type(layer.mlp), type(layer.mixer)) for layer in decoder)
        return len(set(zip(kinds, of_attention, strict=True))) > 1

    def total(self, of: Callable[[Layer], float]) -> float:
        """Return the sum of `of` over the layers."""
        return sum((number * of(kind) for kind, number in self.kinds), 0.0)

    def count(self, where: Callable[[Layer], object]) -> int:
        """Return the number of layers for which `where` holds."""
        return sum(number for kind, number in self.kinds if where(kind))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the description of every layer of the model, in the order of a forward pass; depths of multi-token
    prediction come last."""
    return tuple(stack(config))


def stack(config: Config) -> Stack:
    """Return the layers of the model as a `Stack`; a slice of it is a chunk."""
    return _stack(config.model)


@functools.lru_cache(maxsize=64)
def _stack(model: ModelConfig) -> Stack:
    decoder = tuple(_layer(model, number) for number in range(model.num_layers))
    of_depth = model.mtp_hybrid_override_pattern
    kinds = [decoder[-1]] if of_depth is None else [_layer(model, len(decoder) - 1, letter) for letter in of_depth]
    ahead = [
        replace(kind, next_token=one if of_depth is None else replace(one, place=place))
        for depths in brought("next_tokens")
        for one in depths(model, final_norm(model))
        for place, kind in enumerate(kinds)
    ]
    return Stack((*decoder, *(replace(layer, number=len(decoder) + place) for place, layer in enumerate(ahead))))


def numbers_of_parts(config: Config) -> dict[Number, int]:
    """Return the numbers that parts of the model report, with how many parts report each, depths of multi-token
    prediction included."""
    # Layer by layer, not by kind: every depth has a number of its own. Of the losses of a router that is applied
    # several times, megatron-core records the mean.
    reports = ((layer, part) for layer in stack(config) for part in layer.parts)
    once = (part for layer, part in reports if not (layer.repeats and part is layer.experts))
    return dict(Counter(one for part in once for one in part.numbers(config)))


def _layer(model: ModelConfig, number: int, letter: str | None = None) -> Layer:
    """Return layer `number` of the model, or one of another letter in its place. Here its kind is chosen."""
    letters = model.hybrid_layer_pattern
    if letter is None and letters is not None:
        letter = letters[number] if number < len(letters) else MLP
    has_mixer, has_mlp = letter not in (MLP, EXPERTS), letter in (None, MLP, EXPERTS)
    experts = model.num_experts if letter in (None, EXPERTS) else None
    if not is_dealt(model.moe_layer_freq, model.num_layers, number, "the first", otherwise=True):
        experts = None
    norm = final_norm(model)
    mixer = mixer_of(model, letter, number)(model, norm, number) if has_mixer else None
    places = model.norm_position
    if places == "after-attention":
        places = "after" if isinstance(mixer, Attention) else "before"
    if places == "after-experts":
        places = "before" if experts is None or not has_mlp else "around-mlp"
    return Layer(
        number=number,
        mixer=mixer,
        mlp=_mlp(model, experts) if has_mlp else None,
        norm=norm,
        norm_places=places,  # pyright: ignore[reportArgumentType]
        parallel=None if (form := model.parallel_residual) == "none" else form,  # pyright: ignore[reportArgumentType]
    )


def _mlp(model: ModelConfig, experts: int | None) -> Part:
    return mlp_of(model, model.ffn_hidden_size) if experts is None else experts_of(model, experts)


def final_norm(model: ModelConfig) -> Norm:
    """Return the norm after the last layer, and of the layers themselves."""
    return Norm(model.normalization, model.norm_epsilon, model.norm_parameters)  # pyright: ignore[reportArgumentType]


def rotary_tables(config: Config) -> dict[Table, slice]:
    """Return the tables of angles that the layers read, and the columns of each in one tensor of them all, in the order
    of the layers: a column for each two channels that are rotated together."""
    found: dict[Table, slice] = {}
    end = 0
    for kind, _ in stack(config).kinds:
        if kind.rotary_table is not None and kind.rotary_table not in found:
            rotary, head_size = kind.rotary_table
            start, end = end, end + rotary.room(head_size)
            found[kind.rotary_table] = slice(start, end)
    return found


def residual_std(config: Config) -> float:
    """Return the standard deviation of the initial weights whose products a layer adds to the residual stream.

    It shrinks with the depth, so that the sum of 2 x layers branches keeps its variance (Radford et al. 2019, "Language
    Models are Unsupervised Multitask Learners", section 2.3); a layer of --hybrid-layer-pattern has one branch, as
    megatron-core counts them. With --mup-base-num-layers the branches shrink instead.
    """
    model = config.model
    branches = 2.0 if model.hybrid_layer_pattern is None else 1.0
    return model.matrix_std / math.sqrt(branches * (model.mup_base_num_layers or model.num_layers))
