"""Describes causal self-attention: its queries, keys and values, the keys that each query sees, and its costs.

With T tokens of a rank, H hidden, D and V channels of a query or key head and of a value head, q and g query and
key/value heads of a rank, w bytes of an element, a rank holds of each layer

    heads         w T (D (q + g) + V g)     queries, keys, values (with all_gather: keys and values of all positions)
    core          w T V q + 4 T q           attention's result and the normalizer of its softmax; SDPA keeps no weights
                  w T K q                   with few keys in fp32 on a CPU: the weights (parts/attention/short)
    projection    w T V q                   input of the output projection

and of its context-parallel ranks c each sends, with Q and KV this rank's queries, and keys with values:

    all_gather    (c-1) KV forward, as much backward       all keys to all ranks, their gradients back
    p2p           (c-1) KV forward; (c-1) KV and their gradients in fp32 all the way home backward
    a2a           (c-1)/c (2Q + KV) both ways              queries, keys and values one way, their result the other
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from megatron_ext.config.derived.layer_patterns import is_dealt, read_window
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Core, Exchange, Number, Part, Place, Product, Share, State, taken
from megatron_ext.parts.ways import Asked

_FP32 = 4

KEPT_ROWS = 64
"""Queries of one block of attention that keeps its weights."""

FEW_KEYS = 512
"""Most keys of such a block on a CPU."""

WINDOW_ROWS = 64
"""Queries of a window that are computed at once where no kernel knows windows."""

LARGEST_SCORE = Number("max_attention_logit", "largest", "", "max_attention_logit", "max attention logit")
"""The largest product of a query with a key that it sees, times the scale."""


def has_few_keys(length: int, window: int | None) -> bool:
    """Return whether attention over so many positions keeps its weights on a CPU, in fp32."""
    return (length if window is None else min(length, window + KEPT_ROWS - 1)) <= FEW_KEYS


def _kept_weights(length: int, window: int | None) -> int:
    """Return the number of weights of a sequence and head that are kept."""
    kept = 0
    for first in range(0, length, KEPT_ROWS):
        rows = min(KEPT_ROWS, length - first)
        kept += rows * (first + rows - (0 if window is None else max(0, first + 1 - window)))
    return kept


@dataclass(frozen=True)
class Scaling:
    """Says how the wavelengths of rotation are stretched (see `parts.attention.rope.scaled_inverse_frequencies`).

    Linear (arXiv:2306.15595) and longrope (arXiv:2402.13753) stretch all pairs of channels. Llama 3.1 and YaRN (Peng et
    al. 2023, arXiv:2309.00071) stretch those in full that turn less than `slow` times in the original context, leave
    those alone that turn more than `fast` times, and mix both in between.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factors: tuple[float, ...]
    """Factors by which wavelengths are stretched: one for all pairs, or one for each pair."""

    original_positions: int = 1
    slow: float = 1.0
    fast: float = 1.0
    rounds: bool = True
    """Whether YaRN rounds the indices of the pairs that turn so often outwards."""

    of_table: float = 1.0
    """Factor of the cosines and sines of rotated channels (YaRN, section 3.4)."""

    of_scores: float = 1.0
    """Factor of the scores of all channels."""


@dataclass(frozen=True)
class Rotary:
    """Says how queries and keys are rotated by their position."""

    base: float
    percent: float
    """Share of a head's channels that is rotated."""

    scaling: Scaling | None
    interleaved: bool = False
    """Whether pair i is (channel 2i, channel 2i + 1), and not (channel i, channel i + half)."""

    longest: int | None = None
    """Most positions of a sequence that is rotated so, where longer ones are rotated in another way."""

    of_queries: "Temperature | None" = None
    """How rotated queries grow with their position."""

    def channels(self, head_size: int) -> int:
        """Return the number of rotated channels of a head."""
        return int(head_size * self.percent)

    def room(self, head_size: int) -> int:
        """Return the columns of its table: one for each pair of channels, and one for the factor of queries."""
        return self.channels(head_size) // 2 + (self.of_queries is not None)


@dataclass(frozen=True)
class Temperature:
    """Says how queries grow with their position (Llama 4; Nakanishi 2025, arXiv:2501.19399): by the factor
    1 + scale log(1 + floor((position + first) / step))."""

    scale: float
    step: float
    first: float = 1.0
    """Number that the first position counts as."""

    def channels(self, head_size: int) -> int:
        """Return the channels that the factor takes in a table of angles: one pair."""
        return 2

    def room(self, head_size: int) -> int:
        """Return the columns of its table."""
        return 1


@dataclass(frozen=True)
class Softmax:
    """Says how the products of queries and keys become weights, and which other terms the softmax sums over."""

    sink: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """One more key of every query, whose value is 0: none, one with the score 0, or with a score that each head
    learns."""

    cap: float | None = None
    """Bound of the scores, as cap tanh(scores / cap) (Gemma 2, arXiv:2408.00118, section 2)."""

    has_slopes: bool = False
    """Whether scores fall with the distance from query to key (ALiBi, arXiv:2108.12409)."""

    def slopes(self, heads: int) -> tuple[float, ...] | None:
        """Return the slope of each of `heads` heads, which its scores lose for every position between query and key: a
        geometric series from 2^(-8/n) with n heads, n a power of two; heads beyond n take every second slope of the
        series of 2n (the paper's published code)."""
        if not self.has_slopes:
            return None
        power = 1 << (heads.bit_length() - 1)
        series = [2.0 ** (-8.0 * (number + 1) / power) for number in range(power)]
        return (*series, *(2.0 ** (-4.0 * (2 * number + 1) / power) for number in range(heads - power)))


VANILLA = Softmax()


@dataclass(frozen=True)
class Attention(Part):
    """Causal self-attention, whose query heads share key/value heads group by group. Sizes are of the whole model."""

    modules = ("linear_qkv", "q_layernorm", "k_layernorm", "core_attention", "linear_proj")
    builder = "megatron_ext.parts.attention.build:attention_spec"

    kind: Literal["grouped_query", "latent"]
    """How queries, keys and values are computed; multi-head attention is grouped_query with one query head a group."""

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
    qk_norm: Literal["head", "each-head", "projection"] | None
    """Whether queries and keys are normalized, head by head (with one weight, or one of each) or all heads of a token
    at once."""

    qk_norm_after_rotation: bool
    """Whether the rotated queries and keys are normalized, instead of the unrotated ones."""

    norm: Norm
    """Description of the norms of queries and keys."""

    qkv_bias: bool
    output_bias: bool
    softmax: Softmax = VANILLA
    gate: Literal["channel", "head"] | None = None
    """Whether the attention output is multiplied by the sigmoid of additional channels of the QKV projection: one for
    each channel of the output, or one for each head (arXiv:2505.06708)."""

    clip: float | None = None
    """Bound of the size of each number in queries, keys and values, where they go into rotation."""

    temperature: Temperature | None = None
    of_values: float = 1.0
    """Factor of the values."""

    @property
    def positions(self) -> Rotary | Temperature | None:
        """Description of how positions change queries and keys, by a table of angles; None where they do not."""
        return self.rotary or self.temperature

    @property
    def qkv_size(self) -> int:
        """Channels of the QKV projection's output, gates included."""
        return self.groups * sum(self.sections)

    @property
    def sections(self) -> tuple[int, ...]:
        """Channels of a group's queries, of their gates if there are any, of its key and of its value, in this order in
        the QKV projection."""
        gates = (self.gate_size // self.groups,) if self.gate else ()
        return self.query_size // self.groups, *gates, self.head_size, self.value_head_size

    @property
    def gate_size(self) -> int:
        """Number of channels that gate the attention output of all heads."""
        return {None: 0, "head": self.query_heads, "channel": self.context_size}[self.gate]

    @property
    def qk_norm_sizes(self) -> tuple[int, int] | None:
        """Channels that are normalized together: of queries, and of keys. None without these norms."""
        if self.qk_norm is None:
            return None
        return (self.query_size, self.key_size) if self.qk_norm == "projection" else (self.head_size, self.head_size)

    @property
    def rotary_size(self) -> int:
        """Channels of a head of which `rotary` rotates a share."""
        return self.head_size

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
        """Channels of the attention output of all query heads: the width of the output projection's input."""
        return self.query_heads * self.value_head_size

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the output projection, the fused QKV, and the norms of queries and keys."""
        hidden, qkv = place.model.hidden_size, self.qkv_size
        if self.softmax.sink == "learnable":
            name = f"{place.name}.core_attention.softmax_offset"
            std = place.model.init_method_std
            yield Parameter(name, (self.query_heads,), place.stage, "normal", std, tp_dim=0)
        if self.output_bias:
            yield place.vector("linear_proj.bias", hidden, sequence_parallel=True)
        yield place.matrix("linear_proj.weight", hidden, self.context_size, adds=True, tp_dim=1)
        yield place.matrix("linear_qkv.weight", qkv, hidden, tp_dim=0, sections=self.sections)
        if self.qkv_bias:
            yield place.vector("linear_qkv.bias", qkv, tp_dim=0)
        heads = self.query_heads, self.groups
        for name, size, count in zip(("q_layernorm", "k_layernorm"), self.qk_norm_sizes or (), heads, strict=False):
            for parameter in self.norm.parameters(place.inside(name), size):
                each = self.qk_norm == "each-head"
                yield replace(parameter, shape=(count, size), by_element=True) if each else parameter

    def state(self, place: Place) -> Iterator[State]:
        """Yield the `_extra_state` that megatron-core saves with each linear layer."""
        for name in ("linear_proj", "linear_qkv"):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return the projections."""
        # A rank has at least one group of keys and values, so that they are repeated where there are fewer of them.
        keys = max(self.groups // share.tensor, 1) * (self.head_size + self.value_head_size)
        return [
            Product(share.tokens, (self.query_size + self.gate_size) // share.tensor + keys, share.hidden),
            Product(share.tokens, share.hidden, self.context_size // share.tensor),
        ]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of queries, keys and values with the activations that their norms keep, of the attention
        output, and of the output projection's input."""
        queries, groups = self.query_heads // share.tensor, max(self.groups // share.tensor, 1)
        gathered = share.context if "all_gather" in share.config.layout.cp_comm_type else 1
        keys, values = self.head_size * groups, self.value_head_size * groups
        heads = share.width * share.tokens * (self.head_size * queries + gathered * (keys + values))
        if self.qk_norm is not None:
            # Queries and keys once more, and a number of each head and token, or of each token's queries and keys.
            numbers = 2 if self.qk_norm == "projection" else queries + groups
            heads += (share.width * (self.head_size * queries + keys) + _FP32 * numbers) * share.tokens
        context = share.width * share.tokens * self.value_head_size * queries
        if self.gate:
            sigmoids = _FP32 * share.tokens * self.gate_size // share.tensor
            heads += context + sigmoids  # what it multiplies, and by what
        if self.clip is not None:
            heads += share.width * share.tokens * (self.head_size * queries + keys + values)  # before they are clipped
        core = context + _FP32 * share.tokens * queries
        if self._keeps_weights(share):
            core = share.width * share.tokens * queries * _kept_weights(share.length, self.window) / share.length
        return {"heads": heads, "core": core, "projection": context}

    def _keeps_weights(self, share: Share) -> bool:
        """Return whether whole sequences with few keys are computed without a kernel."""
        config = share.config
        whole = share.context == 1 or ("a2a" in config.layout.cp_comm_type and self.window is None)
        plain = config.model.attention_dropout == 0.0 and not config.data.reset_attention_mask
        plain = plain and self.softmax == VANILLA and not share.fused and share.width == _FP32
        return whole and plain and has_few_keys(share.length, self.window)

    def gradients(self, share: Share) -> float:
        """Return gradient bytes: of queries, keys and values."""
        return self.held(share)["heads"]

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the sums of norms over the whole projection, the projection where ranks share a group of keys, which
        megatron-core gathers whole, and what context-parallel ranks exchange."""
        if share.tensor > 1 and self.qk_norm == "projection":
            # The mean squares of a token's whole queries, and of its keys, in fp32, and their gradients.
            both = 2 * 2 * (share.tensor - 1) / share.tensor * _FP32 * share.tokens
            yield Exchange("tp", "all-reduce", both, both, (2, 2), "{twice} m (t-1)/t 4 S/c B", "mixer")
        if self.groups < share.tensor:
            one = (share.tensor - 1) / share.tensor * share.tokens * self.qkv_size * share.width
            yield Exchange("tp", "all-gather", one, 0.0, (1, 0), "m {layers} (t-1)/t QKV", "mixer")
            yield Exchange("tp", "reduce-scatter", 0.0, one, (0, 1), "m {layers} (t-1)/t QKV", "mixer")
        exchanges, c = set(share.config.layout.cp_comm_type), share.context
        if c == 1 or len(exchanges) > 1:
            return
        [exchange] = exchanges
        sizes = self.head_size, self.value_head_size
        head = sum(share.tokens * channels * share.width // share.tensor for channels in sizes)
        groups = max(self.groups, share.tensor)
        keys, queries = groups * head, self.query_heads * head
        if LARGEST_SCORE in self.numbers(share.config) and exchange != "a2a":
            each = (c - 1) * groups * (share.tokens * self.head_size * share.width // share.tensor)
            yield Exchange("cp", "all-gather", each, 0.0, (1, 0), "m {layers} (c-1) K", "core")
        if exchange == "all_gather":
            yield Exchange("cp", "all-gather", (c - 1) * keys, 0.0, (1, 0), "m {layers} (c-1) KV", "core")
            yield Exchange("cp", "reduce-scatter", 0.0, (c - 1) * keys, (0, 1), "m {layers} (c-1) KV", "core")
        elif exchange == "p2p":
            home = c * keys * _FP32 // share.width
            formula = f"m L ({{times}}(c-1) + {_FP32 // share.width} c) KV"
            yield Exchange("cp", "send", (c - 1) * keys, (c - 1) * keys + home, (c - 1, c - 1), formula, "core")
        elif exchange == "a2a":
            both = (c - 1) / c * (queries + keys)
            yield Exchange("cp", "all-to-all", both, both, (2, 2), "m {layers} (c-1)/c (2Q + KV)", "core")

    def numbers(self, config: Config) -> Iterator[Number]:
        """Yield the largest score where something reads it."""
        if config.optimizer.qk_clip or config.logging.log_max_attention_logit:
            yield LARGEST_SCORE

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the pieces that it asks for besides causal softmax over grouped heads."""
        found = {}
        if config.model.attention_dropout > 0.0:
            text = f"--attention-dropout is {config.model.attention_dropout:g}"
            found["dropout"] = Asked(text, "--attention-dropout 0")
        if self.window is not None:
            found["window"] = Asked(f"--window-size is {config.model.window_size}", "--window-size -1,0")
        if self.softmax.sink != "vanilla":
            local = "" if config.model.softmax_type_local is None or self.window is None else "-local"
            found["sink"] = Asked(f"--softmax-type{local} is {self.softmax.sink}", f"--softmax-type{local} vanilla")
        if self.softmax.cap is not None:
            text = f"--attention-logit-softcapping is {self.softmax.cap:g}"
            found["cap"] = Asked(text)
        if self.softmax.has_slopes:
            found["slopes"] = Asked("--position-embedding-type is alibi", "--position-embedding-type rope")
        if self.gate:
            found["gate"] = Asked("--attention-output-gate is given")
        if self.clip is not None:
            found["clip"] = Asked(f"--qkv-clip is {self.clip:g}")
        if config.model.rotary_base_local is not None:
            text = f"--rotary-base-local is {config.model.rotary_base_local:g}"
            found["rotation by layer"] = Asked(text, "leave --rotary-base-local out")
        if self.rotary is not None and self.rotary.scaling is not None and self.rotary.scaling.of_table != 1.0:
            found["longer queries"] = Asked(f"--rope-type is {config.model.rope_type}", "--rope-type rope")
        temperature = self.temperature if self.rotary is None else self.rotary.of_queries
        if temperature is not None:
            text = f"--attention-temperature-scale is {temperature.scale:g}"
            found["temperature"] = Asked(text, "leave --attention-temperature-scale out")
        if self.groups != config.model.num_key_value_heads:
            text = f"--num-query-groups-local is {self.groups}"
            found["groups by layer"] = Asked(text, "leave --num-query-groups-local out")
        if self.value_head_size != self.head_size:
            text = f"--value-channels is {self.value_head_size}"
            found["other values"] = Asked(text, "leave --value-channels out")
        if self.of_values != 1.0:
            found["multiplied values"] = Asked(f"--value-multiplier is {self.of_values:g}", "--value-multiplier 1")
        if self.qk_norm in ("each-head", "projection"):
            found["norms of projections"] = Asked(f"--qk-layernorm-over is {self.qk_norm}", "--qk-layernorm-over head")
        return found

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

    def core(self, share: Share) -> Core:
        """Return scores, softmax and sum of values.

        Flash attention computes the scores once more in its backward pass: 5 products to the forward pass' 2. Written
        out, the whole square of scores goes through the memory.
        """
        heads, wide = self.query_heads / share.tensor, self.head_size + self.value_head_size
        span = share.length if self.window is None else min(share.length, self.window + WINDOW_ROWS)
        return Core(
            flops=share.tokens * self.core_flops(share.length) / share.tensor,
            again=2.5,
            written_out=2 * share.tokens * span * (heads * wide),
            inner=self.head_size,
            scores=heads * share.tokens * span,
        )


def attention_of(model: ModelConfig, norm: Norm, number: int) -> Attention:
    """Return the attention of layer `number`, with norms of this kind."""
    rotary, window = _rotary(model, number), window_of(model, number)
    without_weight = model.qk_l2_norm and rotary is not None
    scale = model.attention_temperature_scale
    if scale is not None and rotary is not None and model.attention_temperature_of == "rotated":
        rotary = replace(rotary, of_queries=Temperature(scale, model.attention_temperature_step, 0.0))
    scale = scale if rotary is None and model.attention_temperature_of == "fixed" else None
    return Attention(
        kind="grouped_query",
        query_heads=model.num_attention_heads,
        groups=(window is not None and model.num_query_groups_local) or model.num_key_value_heads,
        head_size=model.kv_channels,
        value_head_size=model.value_channels or model.kv_channels,
        window=window,
        rotary=rotary,
        qk_norm=model.qk_layernorm_over if model.qk_layernorm else "head" if without_weight else None,  # pyright: ignore[reportArgumentType]
        qk_norm_after_rotation=model.qk_layernorm_place == "after",
        norm=_query_key_norm(model, norm, without_weight),
        qkv_bias=model.has_qkv_bias,
        output_bias=model.has_output_bias,
        softmax=Softmax(
            (window is not None and model.softmax_type_local) or model.softmax_type,  # pyright: ignore[reportArgumentType]
            model.attention_logit_softcapping,
            model.position_embedding_type == "alibi",
        ),
        gate=model.attention_output_gate_over if model.attention_output_gate else None,  # pyright: ignore[reportArgumentType]
        clip=model.qkv_clip,
        temperature=None if scale is None else Temperature(scale, model.attention_temperature_step),
        of_values=model.value_multiplier,
    )


def _query_key_norm(model: ModelConfig, norm: Norm, without_weight: bool) -> Norm:
    """Return the norm of queries and keys. Those of each head have no biases."""
    if without_weight:
        return Norm("RMSNorm", norm.epsilon, "none")
    return replace(norm, owns="weight") if model.qk_layernorm_over == "each-head" else norm


def window_of(model: ModelConfig, number: int) -> int | None:
    """Return the window of layer `number`; none where the flags cannot be read, which a rule says."""
    pattern = model.window_attn_skip_freq
    if model.window_size is None or not is_dealt(pattern, model.num_layers, number, otherwise=True):
        return None
    try:
        return read_window(model.window_size)
    except ValueError:
        return None


def _rotary(model: ModelConfig, number: int) -> Rotary | None:
    """Return the rotation of layer `number`. Layers with a window may have a RoPE base of their own, without
    scaling."""
    fixed = is_dealt(model.no_rope_freq, model.num_layers, number, "the last")
    if model.position_embedding_type != "rope" or fixed:
        return None
    kind = model.rotary_percent, model.rotary_interleaved
    if model.rotary_base_local is not None and window_of(model, number) is not None:
        return Rotary(model.rotary_base_local, kind[0], None, kind[1])
    base, length, original = model.rotary_base, model.seq_length or 1, max(model.original_max_position_embeddings, 1)
    if model.rope_type == "dynamic":
        # NTK-aware interpolation of this length (transformers' _compute_dynamic_ntk_parameters).
        channels, factor = int((model.kv_channels or 0) * model.rotary_percent), max(model.rotary_scaling_factor, 1.0)
        growth = factor * max(length / original, 1.0) - (factor - 1.0)
        base *= math.exp(min(math.log(growth) * channels / max(channels - 2, 1), 300.0))
    by_length = model.rope_type in ("dynamic", "longrope")
    return Rotary(base, kind[0], scaling_of(model), kind[1], original if by_length and length <= original else None)


def yarn_length(mscale: float, factor: float) -> float:
    """Return by how much YaRN lengthens channels where it stretches the context by a factor (section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def scaling_of(model: ModelConfig) -> Scaling | None:
    """Return the scaling of the model's rotary frequencies."""
    factor, original = max(model.rotary_scaling_factor, 1.0), max(model.original_max_position_embeddings, 2)
    length = model.rotary_attention_factor
    if model.rope_type == "yarn":
        usual = yarn_length(model.mscale, factor) / yarn_length(model.mscale_all_dim, factor)
        return Scaling(
            "yarn",
            (factor,),
            original,
            model.beta_slow,
            model.beta_fast,
            not model.no_yarn_correction_range_round_to_int,
            length or usual,
        )
    if model.rope_type == "longrope":
        is_long = (model.seq_length or 1) > original
        factors = model.longrope_long_factor if is_long else model.longrope_short_factor
        usual = math.sqrt(1.0 + math.log(factor) / math.log(original))
        return Scaling("longrope", factors or (1.0,), original, of_table=length or usual)
    if model.use_rope_scaling:
        return Scaling(
            "llama3",
            (model.rope_scaling_factor,),
            model.rope_scaling_original_max_position_embeddings,
            model.rope_scaling_low_freq_factor,
            model.rope_scaling_high_freq_factor,
        )
    interpolation = model.rotary_seq_len_interpolation_factor
    return Scaling("linear", (interpolation,)) if interpolation != 1.0 else None


def draw(random: Random) -> list[str]:
    """Return flags of attention, drawn at random, for heads of 16 channels."""
    normed = (
        "",
        "",
        " --qk-layernorm-over projection",
        " --qk-layernorm-over each-head",
        " --qk-layernorm-place after",
    )
    gates = f"--attention-output-gate --attention-output-gate-over {random.choice(('channel', 'head'))}"
    scores = [f"--softmax-type {random.choice(('learnable', 'off-by-one'))}", "--attention-logit-softcapping 2"]
    scores += [
        "--softmax-scale 0.4",
        "--qkv-clip 1",
        f"--kv-channels {random.choice((8, 24))}",
        f"--value-channels {random.choice((10, 24))} --value-multiplier 0.7",
    ]
    return [
        *_drawn_positions(random),
        *taken(random, (0.75, f"--group-query-attention --num-query-groups {random.choice((1, 2, 2, 4))}")),
        *taken(random, (0.3, f"--qk-layernorm{random.choice(normed)}"), (0.15, gates), (0.4, random.choice(scores))),
        *taken(random, (0.1, random.choice(scores)), (0.2, "--add-qkv-bias"), (0.15, "--add-output-bias")),
    ]


def _drawn_positions(random: Random) -> list[str]:
    """Return flags of positions, and of the positions that each query sees."""
    rotated = [
        f"--rotary-percent 0.5{random.choice(('', ' --rotary-interleaved'))}",
        "--rotary-interleaved",
        "--qk-l2-norm",
    ]
    rotated += [f"--no-rope-freq {random.choice(('2', '[0,1,0,0]'))}", "--rotary-base 100"]
    heated = "--attention-temperature-scale 0.5 --attention-temperature-step 5"
    rotated += [f"--no-rope-freq 2 {heated}", f"--attention-temperature-of rotated {heated}"]
    rotated += [*_drawn_stretches(random)]
    local = [
        f"--num-query-groups-local {random.choice((1, 4))}",
        "--softmax-type-local learnable",
        "--rotary-base-local 100",
    ]
    layers = random.choice(("2", "[1,1,0,1]", "[0,1,0,0]"))
    window = f"--window-size {random.choice((3, 15))},0"
    kind = random.choice(("rope", "rope", "rope", "rope", "learned_absolute", "none", "alibi"))
    return [
        f"--position-embedding-type {kind}",
        *taken(random, (0.3 * (kind == "learned_absolute"), "--position-embedding-offset 2")),
        *taken(random, (0.1, f"--max-position-embeddings {random.choice((40, 64))}")),
        *taken(random, (0.5 * (kind == "rope"), random.choice(rotated))),
        *taken(
            random, (0.3, f"{window} --window-attn-skip-freq {layers} {random.choice((*local, '', '', ''))}".strip())
        ),
    ]


def _drawn_stretches(random: Random) -> Iterator[str]:
    """Yield flags of each way of stretching the context of rotary positions, for heads of 16 channels."""
    yield f"--rotary-seq-len-interpolation-factor {random.choice((2, 4))}"
    bounds = random.choice(("", " --rope-scaling-low-freq-factor 0.5 --rope-scaling-high-freq-factor 2"))
    of_llama = "--use-rope-scaling --rope-scaling-factor 4 --rope-scaling-original-max-position-embeddings"
    yield f"{of_llama} {random.choice((16, 64))}{bounds}"
    more = (
        "",
        "--rotary-attention-factor 1.3",
        "--beta-fast 8 --beta-slow 2",
        "--mscale 0.7 --mscale-all-dim 0.4",
        "--no-yarn-correction-range-round-to-int",
    )
    original = "--original-max-position-embeddings"
    yield f"--rope-type yarn --rotary-scaling-factor 4 {original} 32 {random.choice(more)}".strip()
    kind, length = random.choice(("dynamic", "rope")), random.choice((16, 32))
    yield f"--rope-type {kind} --rotary-scaling-factor 4 {original} {length}"
    short, long = (" ".join(str(first + 0.25 * pair) for pair in range(8)) for first in (1, 2))
    factors = f"--longrope-short-factor {short} --longrope-long-factor {long}"
    yield f"--rope-type longrope {factors} --rotary-scaling-factor 2 {original} {random.choice((16, 64))}"
