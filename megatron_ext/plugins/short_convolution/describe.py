"""Describes the gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404, section 2): one projection gives
B, C and x of each channel, and the layer's output is a projection of C * convolution(B * x), where the convolution sees
the latest K positions of the same channel.

With T tokens of a rank, B samples, h channels, t tensor-parallel ranks, K positions and w bytes of an element, a rank
holds of each layer

    projected     w T 3 h / t      B, C and x, and w (K - 1) B h / t inputs that come before each part of a sample
    projection    w T h / t        input of the output projection

What lies between these is computed again in the backward pass, span by span. With --context-parallel-size a rank has
two parts of every sample, and sends all others the last K - 1 inputs of the convolution of each, whatever the length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.parts.kinds import Mixer
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Core, Exchange, Part, Place, Product, Share, State, taken
from megatron_ext.parts.ways import Asked
from megatron_ext.plugins.gated_delta.flags import VARIANTS
from megatron_ext.plugins.short_convolution.flags import LETTER, ShortConvolutionFlags

SPAN = 1024
"""Positions that are computed at once, and again in the backward pass."""

_FP32 = 4


@dataclass(frozen=True)
class ShortConvolution(Part):
    """A gated short convolution over the hidden size. B, C and x of a channel are rows next to each other in the
    projection, so that tensor-parallel ranks divide it by channels."""

    builder = "megatron_ext.plugins.short_convolution.compute:mixer_spec"
    keeps_a_state = True
    modules = ("in_proj", "conv1d", "out_proj")

    channels: int
    kernel: int
    """Positions that the convolution sees."""

    bias: bool = False
    """Whether the projections and the convolution have biases."""

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the projections and the convolution, which begins as torch begins one of single channels."""
        channels, sections = self.channels, (1, 1, 1)
        if self.bias:
            yield place.vector("out_proj.bias", channels, sequence_parallel=True)
        yield place.matrix("out_proj.weight", channels, channels, adds=True, tp_dim=1)
        yield place.matrix("in_proj.weight", 3 * channels, channels, tp_dim=0, sections=sections)
        if self.bias:
            yield place.vector("in_proj.bias", 3 * channels, tp_dim=0, sections=sections)
        name, shape = f"{place.name}.conv1d.weight", (channels, 1, self.kernel)
        yield Parameter(name, shape, place.stage, "uniform", (3.0 * self.kernel) ** -0.5, tp_dim=0)
        if self.bias:
            yield place.vector("conv1d.bias", channels, tp_dim=0)

    def state(self, place: Place) -> Iterator[State]:
        """Yield the extra state that is saved with each linear layer."""
        for name in ("in_proj", "out_proj"):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return the projections."""
        channels = self.channels // share.tensor
        return [
            Product(share.tokens, 3 * channels, share.hidden),
            Product(share.tokens, share.hidden, channels),
        ]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of B, C and x with the inputs before each part of a sample, and of the output projection's
        input. Nothing between them is held that recomputation could drop."""
        channels = share.width * self.channels // share.tensor
        before = self._pieces(share) * self._samples(share) * (self.kernel - 1)
        return {"projected": channels * (3 * share.tokens + before), "core": 0.0, "projection": channels * share.tokens}

    def computed_again(self, share: Share) -> float:
        """Return the bytes that autograd keeps of one span: inputs and outputs of the convolution, and inputs for each
        further position where documents are kept apart."""
        positions = self._pieces(share) * self._samples(share) * min(SPAN, share.length // share.context)
        apart = self.kernel - 1 if share.config.data.reset_attention_mask else 0
        return _FP32 * positions * self.channels // share.tensor * (2 + apart)

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield what context-parallel ranks exchange: the inputs of the convolution at the end of each part."""
        if share.context == 1 or self.kernel == 1:
            return
        last = 2 * share.width * self._samples(share) * (self.kernel - 1) * self.channels // share.tensor
        each = (share.context - 1) * last
        formula = "m {layers} (c-1) 2 B w (K-1) h/t"
        yield Exchange("cp", "all-gather", each, 0.0, (1, 0), formula, "mixer")
        yield Exchange("cp", "reduce-scatter", 0.0, each, (0, 1), formula, "mixer")

    def core_flops(self, length: int) -> float:
        """Return the operations of one token, forward, for its two gates. The convolution is among the matrices."""
        return 2.0 * self.channels

    def core(self, share: Share) -> Core:
        """Return the operations of a rank's microbatch, which its backward pass computes once more."""
        channels = share.tokens * self.channels / share.tensor
        return Core(2.0 * channels, 3.0, 2.0 * channels, self.kernel, 4 * channels)

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the piece that a gated short convolution asks of a way of computing a layer (`parts/ways.py`)."""
        model = config.model
        asked = f"--hybrid-layer-pattern is {model.hybrid_layer_pattern}"
        if model.hybrid_layer_pattern is None:
            layers = flags_of(model, ShortConvolutionFlags).full_attn_idxs or ()
            asked = f"--full-attn-idxs is {' '.join(map(str, layers))}"
        lacked_by = {
            "Transformer Engine": "which has no gated short convolution here",
            "FP8": "which was never compared with another layout in gated short convolutions",
        }
        return {"short convolution": Asked(asked, lacked_by=lacked_by)}

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield that ranks do not divide the channels, or that a part of a sample is shorter than the positions that
        the convolution sees."""
        model, layout = config.model, config.layout
        if self.channels and positive(ranks := layout.tensor_model_parallel_size) and self.channels % ranks:
            yield (
                f"--hidden-size {self.channels} is not divisible by --tensor-model-parallel-size {ranks}, which "
                "divides the channels of gated short convolutions; use --tensor-model-parallel-size 1"
            )
        pieces = 2 * layout.context_parallel_size
        if pieces > 2 and model.seq_length // pieces < self.kernel - 1:
            yield (
                f"--conv-l-cache {self.kernel} reaches beyond the {model.seq_length // pieces} positions of a part of "
                f"a sample with --context-parallel-size {layout.context_parallel_size}; use --seq-length "
                f"{pieces * self.kernel}"
            )

    def _pieces(self, share: Share) -> int:
        return 1 if share.context == 1 else 2

    def _samples(self, share: Share) -> int:
        return share.tokens * share.context // share.length


def short_convolution_of(model: ModelConfig) -> ShortConvolution:
    """Return the gated short convolution of the model's layers."""
    flags = flags_of(model, ShortConvolutionFlags)
    return ShortConvolution(model.hidden_size, flags.conv_l_cache, flags.conv_bias)


def _is_asked(model: ModelConfig, number: int) -> bool:
    attends = flags_of(model, ShortConvolutionFlags).full_attn_idxs
    return attends is not None and number not in attends


def layers_with_attention_are_some(config: Config, facts: Facts) -> Iterator[str]:
    """Require indices of layers of the model, not of all, and nothing else that says what these layers mix by."""
    model = config.model
    attends = flags_of(model, ShortConvolutionFlags).full_attn_idxs
    if attends is None or not positive(model.num_layers):
        return
    said = f"--full-attn-idxs {' '.join(map(str, attends))}"
    if max(attends, default=0) >= model.num_layers:
        yield (
            f"{said} names layer {max(attends)}, but --num-layers is {model.num_layers}, and the last one is "
            f"{model.num_layers - 1}; use --full-attn-idxs {model.num_layers - 1}"
        )
    elif {*range(model.num_layers)} <= {*attends}:
        yield f"{said} names all layers, so that none is a gated short convolution; leave it out"
    if model.hybrid_layer_pattern is not None:
        yield f"--hybrid-layer-pattern {model.hybrid_layer_pattern} says what each layer is, but {said}; leave it out"
    if (variant := model.experimental_attention_variant) in VARIANTS:
        yield (
            f"{said} gives all other layers a gated short convolution, but --experimental-attention-variant is "
            f"{variant}, which is of some layers, too; leave --experimental-attention-variant out"
        )


def draw(random: Random) -> list[str]:
    """Return flags of gated short convolutions in some layers, drawn at random; most draws have none."""
    which = random.choice(("--full-attn-idxs 1", "--full-attn-idxs 0", "--hybrid-layer-pattern C-*-C-"))
    bias = random.choice(("", " --conv-bias"))
    return taken(random, (0.12, f"{which} --conv-l-cache {random.choice((1, 3, 4))}{bias}"))


MIXERS = (Mixer(LETTER, lambda model, norm, number: short_convolution_of(model), _is_asked),)

RULES = (layers_with_attention_are_some,)

DRAWS = (draw,)
