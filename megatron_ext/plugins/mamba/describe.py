"""Describes Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): in the place of keys and values of all positions each head has
a state of one size, which every position decays, reads, and adds to. Heads of a group share B, with which they add to
the state, and C, with which they read it, as value heads of a gated delta rule share a key head; Mamba-2 is a gated
delta rule without the correction.

With g groups of a rank, R heads of each, N numbers of a state's channel and P channels of a head, a rank holds the
tensors listed in `plugins/gated_delta/describe.py`, with D = N, V = P, and g (2 N + 2 R P + R) channels of the
projection. Context-parallel ranks send the maps of the state of their parts of a sample, a factor and a sum for each
head: 2 B g R N (P + 1) fp32 numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.parts.kinds import Mixer
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Exchange, Place, Share, taken
from megatron_ext.parts.ways import Asked
from megatron_ext.plugins.gated_delta.describe import CHUNK, SPAN, GatedDelta
from megatron_ext.plugins.gated_delta.flags import GatedDeltaFlags
from megatron_ext.plugins.mamba.flags import LETTER, MambaFlags

_FP32 = 4


@dataclass(frozen=True)
class Mamba(GatedDelta):
    """A Mamba-2 mixer. Its groups are the key heads, its heads the value heads of a gated delta rule."""

    builder = "megatron_ext.plugins.mamba.compute:mixer_spec"

    norm_place: str = "after-gate"
    """Whether the norm comes after the gate or before it; none: there is no norm."""

    multipliers: tuple[float, ...] = (1.0,) * 5
    """Factors of gates, x, B, C, and time steps."""

    widest_key = None
    map_columns = 1
    map_flops = 0.5
    sent_maps = "4 R g N (P+1) + w (K-1) g (2N+RP)"

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of a group in the projection: x, B, C, gates z, and time steps."""
        heads = self.per_key * self.value_size
        return heads, self.key_size, self.key_size, heads, self.per_key

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the projections, the convolution, the numbers of each head, and the norm, which begin as Megatron's."""
        channels, heads, stage = self.convolved_size, self.value_heads, place.stage
        yield place.matrix("out_proj.weight", place.model.hidden_size, self.context_size, adds=True, tp_dim=1)
        yield place.matrix(
            "in_proj.weight", self.projected_size, place.model.hidden_size, tp_dim=0, sections=self.sections
        )
        convolution = {"std": (3.0 * self.kernel) ** -0.5, "tp_dim": 0, "sections": self.sections[:3]}
        name = f"{place.name}.conv1d"
        yield Parameter(f"{name}.weight", (channels, 1, self.kernel), stage, "uniform", **convolution)
        yield Parameter(f"{name}.bias", (channels,), stage, "uniform", **convolution)
        yield Parameter(f"{place.name}.dt_bias", (heads,), stage, "time-step", tp_dim=0)
        yield Parameter(f"{place.name}.A_log", (heads,), stage, "log-uniform", tp_dim=0)
        yield place.vector("D", heads, "ones", tp_dim=0)
        if self.norm_place != "none":
            yield place.vector("out_norm.weight", self.context_size, "ones", tp_dim=0)

    def computed_again(self, share: Share) -> float:
        """Return the bytes, within a tenth, that autograd keeps while the backward pass recomputes a span of up to
        `SPAN` positions.

        Each position has the convolved channels three times, four numbers of each head, B and C with their decays, and
        x and outputs five times; each pair of positions of a chunk has decays and products; each chunk has a state.
        With context parallelism a rank has two pieces of a sample: B, C and x are then copied once more. Computing a
        piece's map of the state takes less.
        """
        pieces, samples = 1 if share.context == 1 else 2, share.tokens * share.context // share.length
        part = share.length // (share.context * pieces)
        groups, heads = self.key_heads // share.tensor, self.value_heads // share.tensor
        chunk, of_heads = min(CHUNK, part), heads * self.value_size
        each = self.convolved_size // share.tensor * (3 + (self.kernel - 1) / min(SPAN, part))
        each += 4 * heads + 2 * heads * self.key_size + chunk * (2 * heads + groups)
        each += of_heads * (5 + self.key_size / chunk) + (pieces - 1) * (2 * groups * self.key_size + of_heads)
        return _FP32 * pieces * samples * min(SPAN, part) * each

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges of context-parallel ranks: maps of the state, and the convolution's last inputs, of each
        piece."""
        yield from self.sent_over_pieces(share)

    def core_flops(self, length: int) -> float:
        """Return the operations of one token, forward: adding to the state and reading it; and over half of a chunk's
        square, which causality leaves, the products of B and C and the result."""
        of_states = 4 * self.context_size * self.key_size
        return of_states + min(CHUNK, length) * (self.key_heads * self.key_size + self.context_size)

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the piece that a Mamba-2 mixer asks of a way of computing a layer (`parts/ways.py`)."""
        lacked_by = {
            "Transformer Engine": "which has no Mamba-2 layer here",
            "FP8": "which was never compared with another layout in Mamba-2 layers",
        }
        return {"mamba": Asked(f"--hybrid-layer-pattern is {config.model.hybrid_layer_pattern}", lacked_by=lacked_by)}

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield the problems of its flags."""
        model, flags = config.model, flags_of(config.model, MambaFlags)
        groups, ranks = self.key_heads, config.layout.tensor_model_parallel_size
        if not (model.hidden_size and self.value_size and groups and ranks):
            return
        if flags.mamba_num_heads is None and 2 * model.hidden_size % self.value_size:
            yield (
                f"2 x --hidden-size {model.hidden_size} is not divisible by --mamba-head-dim {self.value_size}, so "
                "that there is no number of heads; use --mamba-num-heads "
                f"{groups * max(2 * model.hidden_size // self.value_size // groups, 1)}"
            )
        elif self.value_heads % groups:
            said = "--mamba-num-heads" if flags.mamba_num_heads else "2 x --hidden-size / --mamba-head-dim ="
            yield (
                f"{said} {self.value_heads} is not divisible by --mamba-num-groups {groups}; use --mamba-num-groups 1"
            )
        elif groups % ranks:
            yield (
                f"--mamba-num-groups {groups} is not divisible by --tensor-model-parallel-size {ranks}; use "
                "--tensor-model-parallel-size 1"
            )
        yield from self.too_short_pieces(config)
        yield from self.not_by_kernels(config)


def mamba_of(model: ModelConfig) -> Mamba:
    """Return the Mamba-2 mixer of the model's layers."""
    # A rule of its own refuses sizes that are missing or 0.
    flags, of_rules = flags_of(model, MambaFlags), flags_of(model, GatedDeltaFlags)
    heads = flags.mamba_num_heads or 2 * (model.hidden_size or 0) // (flags.mamba_head_dim or 1)
    norm = Norm("RMSNorm", model.norm_epsilon)
    sizes = flags.mamba_num_groups, heads, flags.mamba_state_dim, flags.mamba_head_dim
    multipliers = flags.mamba_multipliers or (1.0,) * 5
    settings = {"norm_place": flags.mamba_norm, "multipliers": multipliers, "kernels": of_rules.recurrence_kernels}
    return Mamba(*sizes, of_rules.linear_conv_kernel_dim, norm, **settings)


def draw(random: Random) -> list[str]:
    """Return flags of a hybrid with Mamba-2, drawn at random; most draws have none."""
    pattern = random.choice(("M-M*", "M*M-", "MMM*", "MEM*", "M-*-M-*-", "MG*-"))
    norm = random.choice(("after-gate", "before-gate", "none"))
    sizes = f"--mamba-state-dim 12 --mamba-head-dim 10 --mamba-num-groups 4 --mamba-num-heads 8 --mamba-norm {norm}"
    return taken(random, (0.1, f"--hybrid-layer-pattern {pattern} {sizes} --norm-epsilon 1e-3"))


MIXERS = (Mixer(LETTER, lambda model, norm, number: mamba_of(model)),)

DRAWS = (draw,)
