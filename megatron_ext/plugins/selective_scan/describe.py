"""Describes Mamba-1 (Gu and Dao 2023, arXiv:2312.00752, section 3): each channel has a state of N numbers, which decay
at rates of their own, where Mamba-2 has one rate for a whole head. Time steps, B, with which a channel adds to its
state, and C, with which it reads it, are projected from the convolved channels of a token; all channels share B and C.

With T tokens of a rank, B samples, d channels of a rank, N numbers of a state, r numbers of a time step, K positions of
the convolution and w bytes of an element, a rank holds of each layer

    projected     w T 2 d                    channels x and gates z
    core          w T (d + r + 2 N)          convolved channels, and time steps, B and C; with norms r + 2 N once more
                  4 B d N n                  the state before each of the n spans of its part of a sample
                  w (K - 1) B d              inputs of the convolution before each part
    projection    w T d                      input of the output projection

Tensors between these are computed again in the backward pass, span by span. Tensor-parallel ranks divide the channels,
and add up their shares of the time steps, B and C, r + 2 N numbers of every token. With --context-parallel-size a rank
has two parts of every sample, and sends to all others each part's map of the state, a factor and a sum for each number
of it, and the last inputs of the convolution.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from megatron_ext.config.resolve import positive
from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.parts.kinds import Mixer
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Core, Exchange, Part, Place, Product, Share, State, taken
from megatron_ext.parts.ways import Asked
from megatron_ext.plugins.selective_scan.flags import LETTER, SelectiveScanFlags

SPAN = 128
"""Positions after each of which a state is kept for the backward pass."""

_FP32 = 4


@dataclass(frozen=True)
class SelectiveScan(Part):
    """A Mamba-1 mixer. The channel x and its gate are rows next to each other in the first projection, so that
    tensor-parallel ranks divide it by channels."""

    builder = "megatron_ext.plugins.selective_scan.compute:mixer_spec"
    keeps_a_state = True
    modules = ("in_proj", "conv1d", "x_proj", "dt_norm", "b_norm", "c_norm", "dt_proj", "A_log", "D", "out_proj")

    channels: int
    state_size: int
    """Numbers of the state of a channel."""

    kernel: int
    """Positions that the convolution sees."""

    rank: int
    """Numbers of a token from which its time steps are projected."""

    norm: Literal["none", "without-weights", "with-weights"] = "none"
    """Whether time steps, B and C are normalized."""

    epsilon: float = 1e-5
    """Epsilon of these norms."""

    bias: bool = False
    """Whether the projections of the hidden size have biases."""

    conv_bias: bool = True

    @property
    def shared_sizes(self) -> tuple[int, int, int]:
        """Numbers of a token that all channels share: of its time steps, of B, and of C."""
        return self.rank, self.state_size, self.state_size

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the projections, the convolution, the norms, and the rates and skips of channels, which begin as in the
        paper's published code."""
        hidden, channels, stage = place.model.hidden_size, self.channels, place.stage
        if self.bias:
            yield place.vector("out_proj.bias", hidden, sequence_parallel=True)
            yield place.vector("in_proj.bias", 2 * channels, tp_dim=0, sections=(1, 1))
        yield place.matrix("out_proj.weight", hidden, channels, adds=True, tp_dim=1)
        yield place.matrix("in_proj.weight", 2 * channels, hidden, tp_dim=0, sections=(1, 1))
        begins = "uniform", (3.0 * self.kernel) ** -0.5
        yield Parameter(f"{place.name}.conv1d.weight", (channels, 1, self.kernel), stage, *begins, tp_dim=0)
        if self.conv_bias:
            yield Parameter(f"{place.name}.conv1d.bias", (channels,), stage, *begins, tp_dim=0)
        yield place.matrix("x_proj.weight", sum(self.shared_sizes), channels, tp_dim=1)
        steps = place.matrix("dt_proj.weight", channels, self.rank, tp_dim=0)
        yield replace(steps, init="uniform", std=(3.0 * self.rank) ** -0.5)
        yield place.vector("dt_proj.bias", channels, "time-step", tp_dim=0)
        rates = Parameter(f"{place.name}.A_log", (channels, self.state_size), stage, "log-count", tp_dim=0)
        yield replace(rates, by_element=True, never_decays=True)
        yield place.vector("D", channels, "ones", tp_dim=0)
        if self.norm == "with-weights":
            for name, size in zip(("dt", "b", "c"), self.shared_sizes, strict=True):
                yield place.vector(f"{name}_norm.weight", size, "ones")

    def state(self, place: Place) -> Iterator[State]:
        """Yield the extra state that is saved with each linear layer of megatron-core."""
        for name in ("in_proj", "out_proj"):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return the projections."""
        channels, tokens = self.channels // share.tensor, share.tokens
        return [
            Product(tokens, 2 * channels, share.hidden),
            Product(tokens, sum(self.shared_sizes), channels),
            Product(tokens, channels, self.rank),
            Product(tokens, share.hidden, channels),
        ]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of the first projection's output, of what the scan reads and of its states, and of the
        output projection's input."""
        channels, pieces = self.channels // share.tensor, self._pieces(share)
        of_channels = share.width * share.tokens * channels
        spans = pieces * -(-share.length // (share.context * pieces) // SPAN)
        state = _FP32 * self._samples(share) * channels * self.state_size
        tails = share.width * pieces * self._samples(share) * (self.kernel - 1) * channels
        of_all = share.width * share.tokens * sum(self.shared_sizes) * (1 if self.norm == "none" else 2)
        core = of_channels + of_all + spans * state + tails
        if share.context > 1:
            # While maps are computed, states of zeros; the maps of all pieces, and the states that they are applied to.
            core += 2 * spans * state + (6 * share.context - 1) * state
        return {"projected": 2 * of_channels, "core": core, "projection": of_channels}

    def computed_again(self, share: Share) -> float:
        """Return the bytes that autograd keeps while the backward pass recomputes a span.

        These are decay and state of every number of a channel's state, a second decay where documents are kept apart,
        and five numbers of every channel; in 16 bits x, gates, B and C once more; with two pieces C, once more; and the
        rates of all channels.
        """
        channels, pieces = self.channels // share.tensor, self._pieces(share)
        positions = pieces * self._samples(share) * min(SPAN, share.length // (share.context * pieces))
        each = channels * (self.state_size * (3 if share.config.data.reset_attention_mask else 2) + 5)
        if share.width < _FP32:
            each += 2 * (channels + self.state_size)
        each += (pieces - 1) * self.state_size
        return _FP32 * (positions * each + 2 * channels * self.state_size)

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the sums of time steps, B and C over tensor-parallel ranks, and of their gradients; and the exchanges
        of context-parallel ranks: maps of the state, and the convolution's last inputs, of each piece."""
        if share.tensor > 1:
            sums = 2 * (share.tensor - 1) / share.tensor * share.width * share.tokens * sum(self.shared_sizes)
            yield Exchange("tp", "all-reduce", sums, sums, (1, 1), "{twice} m (t-1)/t w T (r+2N)", "core")
        if share.context == 1:
            return
        channels, samples = self.channels // share.tensor, self._samples(share)
        each = 2 * samples * channels * (2 * _FP32 * self.state_size + share.width * (self.kernel - 1))
        each *= share.context - 1
        calls = 2 if self.kernel > 1 else 1
        formula = "m {layers} (c-1) 2 B d/t (8 N + w (K-1))"
        yield Exchange("cp", "all-gather", each, 0.0, (calls, 0), formula, "core")
        yield Exchange("cp", "reduce-scatter", 0.0, each, (0, calls), formula, "core")

    def core_flops(self, length: int) -> float:
        """Return the operations of one token, forward: of each number of a state its product with B, its decay, its sum
        and its product with C, and the skip and the gate of a channel. Rates and convolution are among the matrices."""
        return self.channels * (5.0 * self.state_size + 4.0)

    def core(self, share: Share) -> Core:
        """Return the operations of a rank's microbatch, which its backward pass computes once more; with context
        parallelism, maps of the state are computed before."""
        flops = (2.0 if share.context > 1 else 1.0) * share.tokens * self.core_flops(share.length) / share.tensor
        moved = 6 * share.tokens * self.channels / share.tensor * self.state_size
        return Core(flops, 3.0, flops, self.state_size, moved)

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the piece that a selective scan asks of a way of computing a layer (`parts/ways.py`)."""
        lacked_by = {
            "Transformer Engine": "which has no Mamba-1 layer here",
            "FP8": "which was never compared with another layout in Mamba-1 layers",
        }
        asked = f"--hybrid-layer-pattern is {config.model.hybrid_layer_pattern}"
        return {"selective scan": Asked(asked, lacked_by=lacked_by)}

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield that ranks do not divide the channels, or that a part of a sample is shorter than the positions that
        the convolution sees."""
        model, layout = config.model, config.layout
        if self.channels and positive(ranks := layout.tensor_model_parallel_size) and self.channels % ranks:
            yield (
                f"--scan-channels {self.channels} is not divisible by --tensor-model-parallel-size {ranks}; use "
                "--tensor-model-parallel-size 1"
            )
        pieces = 2 * layout.context_parallel_size
        if pieces > 2 and model.seq_length // pieces < self.kernel - 1:
            yield (
                f"--scan-conv-kernel-dim {self.kernel} reaches beyond the {model.seq_length // pieces} positions of a "
                f"part of a sample with --context-parallel-size {layout.context_parallel_size}; use --seq-length "
                f"{pieces * self.kernel}"
            )

    def _pieces(self, share: Share) -> int:
        return 1 if share.context == 1 else 2

    def _samples(self, share: Share) -> int:
        return share.tokens * share.context // share.length


def selective_scan_of(model: ModelConfig) -> SelectiveScan:
    """Return the Mamba-1 mixer of the model's layers."""
    flags, hidden = flags_of(model, SelectiveScanFlags), model.hidden_size or 0
    return SelectiveScan(
        flags.scan_channels or 2 * hidden,
        flags.scan_state_dim,
        flags.scan_conv_kernel_dim,
        flags.scan_time_step_rank or -(-hidden // 16),
        flags.scan_norm,  # pyright: ignore[reportArgumentType]
        flags.scan_norm_epsilon or model.norm_epsilon,
        flags.scan_bias,
        not flags.no_scan_conv_bias,
    )


def resolve(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fill in --scan-channels and --scan-time-step-rank where they are not given."""
    hidden = values.get("hidden_size")
    if LETTER not in (values.get("hybrid_layer_pattern") or "") or not isinstance(hidden, int) or not positive(hidden):
        return
    for name, usual in (("scan_channels", 2 * hidden), ("scan_time_step_rank", -(-hidden // 16))):
        if values.get(name) is None:
            values[name] = usual


def draw(random: Random) -> list[str]:
    """Return flags of a hybrid with Mamba-1, drawn at random; most draws have none."""
    pattern = random.choice(("S-S*", "S*S-", "SSS*", "SES*", "S-*-S-*-"))
    norm = random.choice(("none", "without-weights", "with-weights"))
    biases = random.choice(("", " --scan-bias", " --no-scan-conv-bias"))
    sizes = (
        f"--scan-state-dim 6 --scan-channels 56 --scan-conv-kernel-dim {random.choice((1, 3, 4))} --scan-norm {norm}"
    )
    sizes += random.choice(("", "", " --scan-time-step-rank 3"))
    sizes += random.choice(("", " --scan-norm-epsilon 1e-4")) if norm != "none" else ""
    return taken(random, (0.06, f"--hybrid-layer-pattern {pattern} {sizes}{biases} --norm-epsilon 1e-3"))


MIXERS = (Mixer(LETTER, lambda model, norm, number: selective_scan_of(model)),)

RESOLVERS = (resolve,)

DRAWS = (draw,)
