"""Describes attention and Mamba-2 side by side (Falcon-H1, arXiv:2507.22448, section 2.1): a rank holds the tensors and
makes the exchanges of both mixers, and sums both outputs over ranks in one exchange."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.parts.attention.describe import Attention, attention_of
from megatron_ext.parts.kinds import Mixer
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Core, Exchange, Place, Product, Share, State, taken
from megatron_ext.parts.ways import Asked
from megatron_ext.plugins.mamba.describe import Mamba, mamba_of
from megatron_ext.plugins.mamba.flags import BESIDE_ATTENTION
from megatron_ext.plugins.side_by_side.flags import SideBySideFlags


@dataclass(frozen=True)
class SideBySide(Attention):
    """Attention, and the Mamba-2 mixer next to it."""

    builder = "megatron_ext.plugins.side_by_side.compute:mixer_spec"
    keeps_a_state = True

    modules = (*Attention.modules, "mamba")
    joined = 1

    mamba: Mamba = field(kw_only=True)
    multipliers: tuple[float, ...] = field(kw_only=True)
    """Factors of attention's output, and of Mamba-2's output."""

    @property
    def blocks(self) -> int:
        """Number of times that tensor-parallel ranks gather its input: once for each mixer."""
        return 2

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the parameters of both."""
        yield from super().parameters(place)
        yield from self.mamba.parameters(place.inside("mamba"))

    def state(self, place: Place) -> Iterator[State]:
        """Yield the states that both mixers keep and save."""
        yield from super().state(place)
        yield from self.mamba.state(place.inside("mamba"))

    def products(self, share: Share) -> list[Product]:
        """Return the products of both."""
        return [*super().products(share), *self.mamba.products(share)]

    def held(self, share: Share) -> dict[str, float]:
        """Return the bytes that both hold."""
        ours, theirs = super().held(share), self.mamba.held(share)
        return {name: ours.get(name, 0.0) + theirs.get(name, 0.0) for name in {**ours, **theirs}}

    def gradients(self, share: Share) -> float:
        """Return the larger of both mixers' gradient bytes, since their backward passes come one after the other."""
        return max(super().gradients(share), self.mamba.gradients(share))

    def computed_again(self, share: Share) -> float:
        """Return the bytes of Mamba-2's recomputation minus the bytes that attention holds, since attention's backward
        pass is over and has freed them. The input of attention's output projection is not subtracted here: the caller
        (`cost/activations.py`) subtracts it."""
        ours = super().held(share)
        return self.mamba.computed_again(share) - sum(ours.values()) + ours["projection"]

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges of both mixers."""
        yield from super().sent(share)
        yield from self.mamba.sent(share)

    def core_flops(self, length: int) -> float:
        """Return the operations of one token in both."""
        return super().core_flops(length) + self.mamba.core_flops(length)

    def core(self, share: Share) -> Core:
        """Return both as one."""
        ours, theirs = super().core(share), self.mamba.core(share)
        attention = share.tokens * super().core_flops(share.length) / share.tensor  # ours.flops counts both
        flops = attention + theirs.flops
        again = (ours.again * attention + theirs.again * theirs.flops) / flops
        return Core(
            *(flops, again, ours.written_out + theirs.written_out, min(ours.inner, theirs.inner)),
            ours.scores + theirs.scores,
        )

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the pieces that attention and Mamba-2 ask of a way of computing a layer (`parts/ways.py`)."""
        return {**super().pieces(config), **self.mamba.pieces(config)}

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield the problems of the flags of either mixer."""
        yield from super().cannot(config)
        yield from self.mamba.cannot(config)


def side_by_side_of(model: ModelConfig, norm: Norm, number: int) -> SideBySide:
    """Return attention and Mamba-2 of layer `number`."""
    both = {"mamba": mamba_of(model), "multipliers": flags_of(model, SideBySideFlags).mixer_multipliers or (1.0, 1.0)}
    return SideBySide(**{**vars(attention_of(model, norm, number)), **both})


def draw(random: Random) -> list[str]:
    """Return flags of attention and Mamba-2 side by side, drawn at random; most draws have none."""
    sizes = "--mamba-state-dim 12 --mamba-head-dim 10 --mamba-num-groups 4 --mamba-num-heads 8 --norm-epsilon 1e-3"
    factors = random.choice(("", " --mixer-multipliers 0.7 1.3 --mamba-multipliers 0.6 1.4 0.8 1.2 0.9"))
    pattern = random.choice(("B-B-", "B-*-", "BBM-"))
    return taken(random, (0.05, f"--hybrid-layer-pattern {pattern} {sizes}{factors}"))


MIXERS = (Mixer(BESIDE_ATTENTION, side_by_side_of),)

DRAWS = (draw,)
