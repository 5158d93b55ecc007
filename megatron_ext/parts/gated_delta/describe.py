"""Describes Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): in the place of keys and values of all positions each
head has a state of one size, which every position decays, reads, and writes to.

With T tokens of a rank, B samples, g key heads of a rank, R value heads of each, D and V channels of a key and of a
value head, K positions of the convolution, c context-parallel ranks, w bytes of an element, a rank holds of each layer

    projected     w T g (2 D + 2 R V + 2 R)     queries, keys, values, gates, decays and steps, before all else
    core          4 B g R D V n                 the state before each of the n spans of its part of a sample
    projection    w T g R V                     input of the output projection

What lies between these is computed again in the backward pass. With --context-parallel-size a rank has two parts of
every sample, computes what each makes of a state before it, and sends all others that, 2 B g R D (D + V) fp32 numbers,
and 2 B (K - 1) g (2 D + R V) inputs of the convolution: both whatever the length of a sample.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Core, Exchange, Part, Place, Product, Share, State
from megatron_ext.parts.ways import Asked

_FP32 = 4

SPAN = 1024
"""Positions after each of which a state is kept for the backward pass."""

CHUNK = 64
"""Positions of a chunk (`rule.CHUNK`)."""


@dataclass(frozen=True)
class GatedDelta(Part):
    """A gated delta rule. Sizes are of the whole model; several value heads share each key head."""

    modules = ("in_proj", "conv1d", "dt_bias", "A_log", "out_norm", "out_proj")

    map_columns: ClassVar[int | None] = None
    """Columns by which a piece of a sample multiplies the state before it; None: as many as a state has rows."""

    map_flops: ClassVar[float | None] = None
    """Operations that finding these takes, over those of the outputs; None: by the columns."""

    sent_maps: ClassVar[str] = "4 R g D (D+V) + w (K-1) g (2D+RV)"

    key_heads: int
    value_heads: int
    key_size: int
    """Channels of a query head and of a key head."""

    value_size: int
    """Channels of a value head, of its gate, and of what it gives."""

    kernel: int
    """Positions that the convolution sees."""

    norm: Norm
    """The norm of what a head gives."""

    @property
    def per_key(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of a key head in the projection: query, key, values, gates, how far it writes, and how it decays."""
        values, per_key = self.per_key * self.value_size, self.per_key
        return self.key_size, self.key_size, values, values, per_key, per_key

    @property
    def projected_size(self) -> int:
        """Channels of the projection's output."""
        return self.key_heads * sum(self.sections)

    @property
    def convolved_size(self) -> int:
        """Channels that are convolved: queries, keys and values."""
        return self.key_heads * sum(self.sections[:3])

    @property
    def context_size(self) -> int:
        """Channels of what all value heads give."""
        return self.value_heads * self.value_size

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the projections, the convolution, the numbers of each value head, and the norm."""
        hidden, channels = place.model.hidden_size, self.convolved_size
        yield place.matrix("out_proj.weight", hidden, self.context_size, adds=True, tp_dim=1)
        yield place.matrix("in_proj.weight", self.projected_size, hidden, tp_dim=0, sections=self.sections)
        # Up to 1 / sqrt(positions), as torch begins a convolution of single channels, and megatron-core with it.
        std = (3.0 * self.kernel) ** -0.5
        name = f"{place.name}.conv1d.weight"
        shape, sections = (channels, 1, self.kernel), self.sections[:3]
        yield Parameter(name, shape, place.stage, "uniform", std, tp_dim=0, sections=sections)
        yield place.vector("dt_bias", self.value_heads, "ones", tp_dim=0)
        yield Parameter(f"{place.name}.A_log", (self.value_heads,), place.stage, "log-uniform", tp_dim=0)
        yield place.vector("out_norm.weight", self.value_size, "ones")
        if self.norm.has_bias:
            yield place.vector("out_norm.bias", self.value_size)

    def state(self, place: Place) -> Iterator[State]:
        """Yield what is saved with each linear layer."""
        for name in ("in_proj", "out_proj"):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return the projections."""
        return [
            Product(share.tokens, self.projected_size // share.tensor, share.hidden),
            Product(share.tokens, share.hidden, self.context_size // share.tensor),
        ]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of the projection's output, of states, and of the output projection's input."""
        pieces, samples = 1 if share.context == 1 else 2, share.tokens * share.context // share.length
        spans = pieces * -(-share.length // (share.context * pieces) // SPAN)
        state = _FP32 * samples * self.value_heads // share.tensor * self.key_size * self.value_size
        tails = share.width * pieces * samples * (self.kernel - 1) * self.convolved_size // share.tensor
        return {
            "projected": share.width * share.tokens * self.projected_size // share.tensor,
            "core": spans * state + tails + self._of_maps(share, spans),
            "projection": share.width * share.tokens * self.context_size // share.tensor,
        }

    def _of_maps(self, share: Share, spans: int) -> float:
        """Return the bytes of what maps of states are made from, and of the maps of all pieces."""
        return self._maps(share) * (spans / 2 + share.context) if share.context > 1 else 0.0

    def _maps(self, share: Share) -> float:
        """Return the bytes of what a rank's two pieces make of a state."""
        samples = share.tokens * share.context // share.length
        columns = (self.map_columns or self.key_size) + self.value_size
        return 2 * _FP32 * samples * self.value_heads // share.tensor * self.key_size * columns

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the gradient of the norm's weight, and what context-parallel ranks exchange."""
        if share.tensor > 1:
            vectors = 2 if self.norm.has_bias else 1
            weight = vectors * 2 * (share.tensor - 1) / share.tensor * share.width * self.value_size
            yield Exchange("tp", "all-reduce", 0.0, weight, (0, vectors), "2 m {layers} (t-1)/t w V", "core")
        yield from self.sent_over_pieces(share)

    def sent_over_pieces(self, share: Share) -> Iterator[Exchange]:
        """Yield what context-parallel ranks exchange."""
        if share.context == 1:
            return
        samples = share.tokens * share.context // share.length
        inputs = 2 * share.width * samples * (self.kernel - 1) * self.convolved_size // share.tensor
        each = (share.context - 1) * (self._maps(share) + inputs)
        calls = 2 if self.kernel > 1 else 1
        formula = f"m {{layers}} (c-1) 2 B ({self.sent_maps})"
        yield Exchange("cp", "all-gather", each, 0.0, (calls, 0), formula, "core")
        yield Exchange("cp", "reduce-scatter", 0.0, each, (0, calls), formula, "core")

    def core_flops(self, length: int) -> float:
        """Return the operations of one token, forward: of the state what reads and writes it, of a chunk half of its
        square, which causality leaves, for the products of keys and queries, the triangular system and its result. The
        convolution is among the matrices."""
        keys, values, chunk = self.key_size, self.value_size, min(CHUNK, length)
        of_states = 6 * self.value_heads * keys * values
        return of_states + chunk * (2 * self.key_heads * keys + self.value_heads * (keys + 2 * values))

    def core(self, share: Share) -> Core:
        """Return the same of a rank's microbatch, which its backward pass computes once more; with context parallelism
        states are mapped before."""
        maps = 1.0
        if share.context > 1:
            maps += self.map_flops or 1.0 + self.key_size / self.value_size / 2
        flops = maps * share.tokens * self.core_flops(share.length) / share.tensor
        heads = self.value_heads / share.tensor
        return Core(flops, 3.0, flops, self.key_size, heads * share.tokens * CHUNK)

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return what it asks of a way of computing it."""
        return {"delta": Asked("--experimental-attention-variant is gated_delta_net")}

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield what its flags cannot be."""
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
    return GatedDelta(
        model.linear_num_key_heads,
        model.linear_num_value_heads,
        model.linear_key_head_dim,
        model.linear_value_head_dim,
        model.linear_conv_kernel_dim,
        norm if norm.has_weight else replace(norm, owns="weight"),
    )
