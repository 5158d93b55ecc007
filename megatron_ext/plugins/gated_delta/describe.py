"""Describes Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): in the place of keys and values of all positions each
head has a state of one size, which every position decays, reads, and writes to. In Kimi Delta Attention (Kimi Team
2025, arXiv:2510.26692, section 4) each channel of a state decays by itself; decays and output gates are projected from
a few numbers of each token, as many as a value head has channels, and gates are sigmoids.

With T tokens of a rank, B samples, g key heads of a rank, R value heads of each, D and V channels of a key and of a
value head, K positions of the convolution, c context-parallel ranks, w bytes of an element, a rank holds of each layer

    projected     w T g (2 D + 2 R V + 2 R)     queries, keys, values, gates, decays and steps, before all else; with a
                                                decay for each channel w T g (2 D + 2 R V + R + R D)
    gates         w T 2 V                       then: inputs of the projections of gates and decays (/t with
                                                sequence parallelism)
    core          4 B g R D V n                 the state before each of the n spans of its part of a sample
    projection    w T g R V                     input of the output projection

Tensors between these are computed again in the backward pass, span by span (`computed_again`). With
--context-parallel-size a rank has two parts of every sample, computes each part's map of the state before it, and sends
to all other ranks the maps, 2 B g R D (D + V) fp32 numbers, and 2 B (K - 1) g (2 D + R V) inputs of the convolution:
both whatever the length of a sample.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from megatron_ext.config.derived.layer_patterns import is_dealt
from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.parts.kinds import Mixer
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Core, Exchange, Part, Place, Product, Share, State, taken
from megatron_ext.parts.ways import Asked
from megatron_ext.plugins.gated_delta.flags import LETTER, VARIANTS, GatedDeltaFlags

_FP32 = 4

SPAN = 1024
"""Positions after each of which a state is kept for the backward pass."""

CHUNK = 64
"""Positions of a chunk (`rule.CHUNK`)."""


@dataclass(frozen=True)
class GatedDelta(Part):
    """A gated delta rule. Sizes are of the whole model; several value heads share each key head."""

    builder = "megatron_ext.plugins.gated_delta.compute:mixer_spec"
    keeps_a_state = True

    modules = (
        *("in_proj", "gates_in_proj", "decay_out_proj", "gate_out_proj", "conv1d", "dt_bias", "A_log", "out_norm"),
        "out_proj",
    )

    map_columns: ClassVar[int | None] = None
    """Columns by which a piece of a sample multiplies the state before it; None: as many as a state has rows."""

    map_flops: ClassVar[float | None] = None
    """Operations of computing a piece's map of the state, divided by the operations of computing the outputs; None:
    derived from the number of columns."""

    sent_maps: ClassVar[str] = "4 R g D (D+V) + w (K-1) g (2D+RV)"

    key_heads: int
    value_heads: int
    key_size: int
    """Channels of a query head and of a key head."""

    value_size: int
    """Channels of a value head, of its gate, and of its output."""

    kernel: int
    """Positions that the convolution sees."""

    norm: Norm
    """Norm of a head's output."""

    by_channel: bool = False
    """Whether each channel of the key decays by itself, as in Kimi Delta Attention."""

    furthest_write: float = 1.0
    """Largest factor of a write, beta: 2 turns the value read at a key into its opposite."""

    kernels: str = "torch"
    """Implementation of the recurrence: torch, or fla (`rule.py`)."""

    widest_key: ClassVar[int | None] = 256
    """Channels of a key that fla-core's kernel takes."""

    @property
    def per_key(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of a key head in the projection: query, key, values, gates, how far it writes, and how it decays; gates
        and decays have projections of their own where these are of channels."""
        values, per_key = self.per_key * self.value_size, self.per_key
        apart = (per_key,) if self.by_channel else (values, per_key, per_key)
        return self.key_size, self.key_size, values, *apart

    @property
    def projected_size(self) -> int:
        """Channels of the projection's output."""
        return self.key_heads * sum(self.sections)

    @property
    def decays(self) -> int:
        """Decays of a value head."""
        return self.key_size if self.by_channel else 1

    @property
    def mixed_size(self) -> int:
        """Channels of all vectors that are projected from a token."""
        apart = self.value_heads * (self.key_size + self.value_size) if self.by_channel else 0
        return self.projected_size + apart

    @property
    def gates_size(self) -> int:
        """Numbers of a token from which decays and gates are projected, of each half."""
        return 2 * self.value_size if self.by_channel else 0

    @property
    def convolved_size(self) -> int:
        """Channels that are convolved: queries, keys and values."""
        return self.key_heads * sum(self.sections[:3])

    @property
    def context_size(self) -> int:
        """Channels of the outputs of all value heads."""
        return self.value_heads * self.value_size

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the projections, the convolution, the numbers of each value head, and the norm."""
        hidden, channels = place.model.hidden_size, self.convolved_size
        yield place.matrix("out_proj.weight", hidden, self.context_size, adds=True, tp_dim=1)
        yield place.matrix("in_proj.weight", self.projected_size, hidden, tp_dim=0, sections=self.sections)
        if self.by_channel:
            halves = (self.value_size,) * 2
            yield place.matrix("gates_in_proj.weight", self.gates_size, hidden, sequence_parallel=True, sections=halves)
            yield place.matrix("decay_out_proj.weight", self.value_heads * self.key_size, self.value_size, tp_dim=0)
            yield place.matrix("gate_out_proj.weight", self.context_size, self.value_size, tp_dim=0)
        # Up to 1 / sqrt(positions), as torch begins a convolution of single channels, and megatron-core with it; with
        # decays of channels as a matrix, as transformers and `fla` do: half-open gates add less at the beginning.
        begins = "uniform", (3.0 * self.kernel) ** -0.5
        if self.by_channel:
            begins = "normal", place.model.init_method_std
        name = f"{place.name}.conv1d.weight"
        shape, sections = (channels, 1, self.kernel), self.sections[:3]
        yield Parameter(name, shape, place.stage, *begins, tp_dim=0, sections=sections)
        # As transformers and `fla` begin each; Megatron-LM's Gated DeltaNet has ones.
        steps = "time-step" if self.by_channel else "ones"
        yield place.vector("dt_bias", self.value_heads * self.decays, steps, tp_dim=0)
        yield Parameter(f"{place.name}.A_log", (self.value_heads,), place.stage, "log-uniform", tp_dim=0)
        yield place.vector("out_norm.weight", self.value_size, "ones")
        if self.norm.has_bias:
            yield place.vector("out_norm.bias", self.value_size)

    def state(self, place: Place) -> Iterator[State]:
        """Yield the extra state that is saved with each linear layer."""
        for name in ("in_proj", "out_proj", *(("decay_out_proj", "gate_out_proj") if self.by_channel else ())):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return the projections."""
        tokens, of_gates = share.tokens, []
        if self.by_channel:
            up = (self.mixed_size - self.projected_size) // share.tensor
            of_gates = [Product(tokens / share.divided, self.gates_size, share.hidden)]
            of_gates += [Product(tokens, up, self.value_size)]
        return [
            Product(tokens, self.projected_size // share.tensor, share.hidden),
            *of_gates,
            Product(tokens, share.hidden, self.context_size // share.tensor),
        ]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of the projection's output, of states, and of the output projection's input."""
        pieces, samples = 1 if share.context == 1 else 2, share.tokens * share.context // share.length
        spans = pieces * -(-share.length // (share.context * pieces) // SPAN)
        state = _FP32 * samples * self.value_heads // share.tensor * self.key_size * self.value_size
        tails = share.width * pieces * samples * (self.kernel - 1) * self.convolved_size // share.tensor
        of_gates = share.width * share.tokens * self.gates_size / share.divided
        if self.by_channel and share.config.layout.sequence_parallel_keep_gathered:
            # The gathered vectors of all ranks, and the layer's input once more, of which the projection reads a part.
            of_gates = share.width * share.tokens * self.gates_size + share.stream
        return {
            **({"gates": of_gates} if self.by_channel else {}),
            "projected": share.width * share.tokens * self.mixed_size // share.tensor,
            "core": spans * state + tails + self._of_maps(share, spans, state),
            "projection": share.width * share.tokens * self.context_size // share.tensor,
        }

    def computed_again(self, share: Share) -> float:
        """Return the bytes that autograd keeps while the backward pass recomputes a span of up to `SPAN` positions.

        For pairs of positions of a chunk, these are decays and products, or with a decay for each channel, keys and
        queries times the decays up to the middle of each of their blocks; for each position, inputs and outputs of the
        convolution, keys, queries and values by heads, the solution of the triangular system, and the output, normed
        and gated; for each chunk but the first, a state. Where a piece's map of the state is computed, keys stand next
        to values, and there is no output.
        """
        pieces, samples = 1 if share.context == 1 else 2, share.tokens * share.context // share.length
        span = min(SPAN, share.length // (share.context * pieces))
        chunk = min(CHUNK, span)
        chunks = -(-span // chunk)
        keys, heads = self.key_heads // share.tensor, self.value_heads // share.tensor
        size, wide, convolved = self.key_size, self.value_size, self.convolved_size // share.tensor
        # With one decay keys and queries are multiplied by matrices, which copies them for several pieces or chunks.
        copies, single, scalars = (0, 0, 2) if self.by_channel else (2 * (pieces * chunks > 1), 4, 6)
        found = []
        for reads in (True, False) if share.context > 1 else (True,):
            columns = wide if reads else size + wide
            pairs = chunk * ((3 + reads) * heads + (1 + reads) * keys)
            if self.by_channel:
                pairs = heads * (chunk * (2 + reads) + (4 + reads) * size * (chunk - 1).bit_length() // 2)
            of_values = heads * (size + 3 * columns + 3 * wide * reads)
            of_keys = heads * size * (6 - single + reads) + keys * size * (1 + reads) * (1 + copies)
            of_each = pairs + 3 * convolved + of_values + of_keys + heads * (scalars + reads) + 2 * keys
            of_chunks = heads * (chunks * self.decays + (chunks - 1) * size * columns)
            found.append(span * of_each + of_chunks + (self.kernel - 1) * convolved)
        return _FP32 * pieces * samples * max(found) + 2 * chunk * chunk  # and two masks

    def _of_maps(self, share: Share, spans: int, state: float) -> float:
        """Return the bytes of the states kept for each span while maps are computed, of the maps of all pieces, and of
        the states that the maps are applied to: all but the last on the rank that has the last piece, and fewer on
        others."""
        if share.context == 1:
            return 0.0
        return self._maps(share) * (spans / 2 + share.context) + (2 * share.context - 1) * state

    def _maps(self, share: Share) -> float:
        """Return the bytes of a rank's maps of the state, one for each of its two pieces."""
        samples = share.tokens * share.context // share.length
        columns = (self.map_columns or self.key_size) + self.value_size
        return 2 * _FP32 * samples * self.value_heads // share.tensor * self.key_size * columns

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges of the norm's gradient and of the inputs of gates, and of context-parallel ranks."""
        if share.tensor > 1:
            vectors = 2 if self.norm.has_bias else 1
            weight = vectors * 2 * (share.tensor - 1) / share.tensor * share.width * self.value_size
            yield Exchange("tp", "all-reduce", 0.0, weight, (0, vectors), "2 m {layers} (t-1)/t w V", "core")
            yield from self._sent_of_gates(share)
        yield from self.sent_over_pieces(share)

    def sent_over_pieces(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges of context-parallel ranks: maps of the state, and the convolution's last inputs, of each
        piece."""
        if share.context == 1:
            return
        samples = share.tokens * share.context // share.length
        inputs = 2 * share.width * samples * (self.kernel - 1) * self.convolved_size // share.tensor
        each = (share.context - 1) * (self._maps(share) + inputs)
        calls = 2 if self.kernel > 1 else 1
        formula = f"m {{layers}} (c-1) 2 B ({self.sent_maps})"
        yield Exchange("cp", "all-gather", each, 0.0, (calls, 0), formula, "core")
        yield Exchange("cp", "reduce-scatter", 0.0, each, (0, calls), formula, "core")

    def _sent_of_gates(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges, over tensor-parallel ranks, of the vectors from which gates and decays are projected."""
        if not self.by_channel:
            return
        size = (share.tensor - 1) / share.tensor * share.width * share.tokens * self.gates_size
        formula = "m {layers} (t-1)/t w T 2 V"
        if not share.config.layout.sequence_parallel:
            yield Exchange("tp", "all-reduce", 0.0, 2 * size, (0, 2), f"2 {formula}", "mixer")
            return
        yield Exchange("tp", "all-gather", size, 0.0, (2, 0), formula, "mixer")
        if not share.config.layout.sequence_parallel_keep_gathered:
            yield Exchange("tp", "all-gather", 0.0, size, (0, 2), formula, "mixer")
        yield Exchange("tp", "reduce-scatter", 0.0, size, (0, 2), formula, "mixer")

    def core_flops(self, length: int) -> float:
        """Return the operations of one token, forward: reading and writing the state; and over half of a chunk's
        square, which causality leaves, the products of keys and queries, the triangular system and its result. The
        convolution is among the matrices. With a decay for each channel value heads have keys and queries of their
        own."""
        keys, values, chunk = self.key_size, self.value_size, min(CHUNK, length)
        of_states = 6 * self.value_heads * keys * values
        pairs = 2 * (self.value_heads if self.by_channel else self.key_heads) * keys
        return of_states + chunk * (pairs + self.value_heads * (keys + 2 * values))

    def core(self, share: Share) -> Core:
        """Return the operations of a rank's microbatch, which its backward pass computes once more; with context
        parallelism, maps of the state are computed before."""
        maps = 1.0
        if share.context > 1:
            maps += self.map_flops or 1.0 + self.key_size / self.value_size / 2
        flops = maps * share.tokens * self.core_flops(share.length) / share.tensor
        heads = self.value_heads / share.tensor
        return Core(flops, 3.0, flops, self.key_size, heads * share.tokens * CHUNK)

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the piece that a gated delta rule asks of a way of computing a layer (`parts/ways.py`)."""
        lacked_by = {
            "Transformer Engine": "which has no gated delta rule",
            "FP8": "which was never compared with another layout in gated delta rules",
        }
        asked = f"--experimental-attention-variant is {config.model.experimental_attention_variant}"
        return {"delta": Asked(asked, lacked_by=lacked_by)}

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield the problems of its flags."""
        layout = config.layout
        if self.value_heads % self.key_heads:
            yield (
                f"--linear-num-value-heads {self.value_heads} is not divisible by --linear-num-key-heads "
                f"{self.key_heads}, which they share; use --linear-num-value-heads {2 * self.key_heads}"
            )
        elif self.key_heads % layout.tensor_model_parallel_size:
            yield (
                f"--linear-num-key-heads {self.key_heads} is not divisible by --tensor-model-parallel-size "
                f"{layout.tensor_model_parallel_size}; use --tensor-model-parallel-size 1"
            )
        yield from self.too_short_pieces(config)
        yield from self.not_by_kernels(config)

    def not_by_kernels(self, config: Config) -> Iterator[str]:
        """Yield why fla-core's kernels cannot compute it, where they are asked for."""
        if self.kernels == "torch":
            return
        if config.training.params_dtype == "float32" and not config.training.tf32:
            yield "--recurrence-kernels fla multiplies fp32 in TF32, and --tf32 is not given; add --tf32, or use --bf16"
        if self.key_size % 2 or self.key_size > (self.widest_key or self.key_size):
            limit = "" if self.widest_key is None else f" up to {self.widest_key}"
            yield (
                f"--recurrence-kernels fla takes an even number of channels of a key{limit}, and there are "
                f"{self.key_size}; use --recurrence-kernels torch"
            )

    def too_short_pieces(self, config: Config) -> Iterator[str]:
        """Yield that a part of a sample has fewer positions than the convolution sees, where that is so."""
        model, layout = config.model, config.layout
        pieces = 2 * layout.context_parallel_size
        if pieces > 2 and model.seq_length // pieces < self.kernel - 1:
            yield (
                f"--linear-conv-kernel-dim {self.kernel} reaches beyond the {model.seq_length // pieces} positions of "
                f"a part of a sample with --context-parallel-size {layout.context_parallel_size}; use --seq-length "
                f"{pieces * self.kernel}"
            )


def gated_delta_of(model: ModelConfig, norm: Norm) -> GatedDelta:
    """Return the gated delta rule of the model's layers, whose norms are of this kind."""
    flags = flags_of(model, GatedDeltaFlags)
    epsilon = norm.epsilon if flags.linear_norm_epsilon is None else flags.linear_norm_epsilon
    return GatedDelta(
        flags.linear_num_key_heads,
        flags.linear_num_value_heads,
        flags.linear_key_head_dim,
        flags.linear_value_head_dim,
        flags.linear_conv_kernel_dim,
        replace(norm, owns=norm.owns if norm.has_weight else "weight", epsilon=epsilon),
        by_channel=model.experimental_attention_variant == "kda",
        furthest_write=2.0 if flags.linear_allow_neg_eigval else 1.0,
        kernels=flags.recurrence_kernels,
    )


def _is_asked(model: ModelConfig, number: int) -> bool:
    pattern = flags_of(model, GatedDeltaFlags).linear_attention_freq
    return model.experimental_attention_variant in VARIANTS and is_dealt(pattern, model.num_layers, number)


def draw(random: Random) -> list[str]:
    """Return flags of gated delta rules in some layers, drawn at random; most draws have none."""
    kind, layers = random.choice(("gated_delta_net", "kda")), random.choice(("2", "4", "[0,1,1,0]"))
    sizes = "--linear-key-head-dim 12 --linear-value-head-dim 10 --linear-num-key-heads 4 --linear-num-value-heads 8"
    given = (
        f"--experimental-attention-variant {kind} --linear-attention-freq {layers} {sizes} --linear-norm-epsilon 1e-3"
    )
    more = random.choice(("", "", "--linear-allow-neg-eigval", "--linear-conv-kernel-dim 2"))
    return taken(random, (0.25, f"{given} {more}".strip()))


MIXERS = (Mixer(LETTER, lambda model, norm, number: gated_delta_of(model, norm), _is_asked),)

DRAWS = (draw,)
