"""Describes an MLP: two matrices with an activation between them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from megatron_ext.config.schema import ModelConfig
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Exchange, Part, Place, Product, Share, State, taken

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "xielu"]

XIELU_BETA = 0.5
XIELU_BEGINNINGS = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.8 - XIELU_BETA))}
"""Numbers of xIELU that a layer learns: with both, the curvatures of its two halves begin at 0.8 (arXiv:2411.13010)."""


@dataclass(frozen=True)
class Mlp(Part):
    """Two matrices with an activation between them."""

    modules = ("linear_fc1", "linear_fc2")

    gated: bool
    """Whether the first matrix has two halves, and the activation of one half multiplies the other."""

    activation: Activation
    width: int
    bias: bool
    clamp: float | None = None
    """Largest value of the gate's activation input, and largest size of the values that the gate multiplies."""

    offset: float = 0.0
    """Number added to the values that the gate multiplies."""

    of_gate: float = 1.0
    """Factor of the gate's activation input."""

    @property
    def keeps_its_input_alone(self) -> bool:
        """Whether activations between the matrices are computed again in the backward pass."""
        changed = self.clamp is not None or self.offset != 0.0 or self.of_gate != 1.0
        return changed or self.activation in ("quick_gelu", "xielu")

    def parameters(self, place: Place, expert: int | None = None, hidden: int | None = None) -> Iterator[Parameter]:
        """Yield both matrices, of a routed expert where it is one; `hidden`: width of its input, where that is not the
        hidden size."""
        hidden = hidden or place.model.hidden_size
        wide, stride = (2 * self.width, 2) if self.gated else (self.width, 1)
        yield place.matrix("linear_fc1.weight", wide, hidden, tp_dim=0, tp_stride=stride, expert=expert)
        if self.bias:
            yield place.vector("linear_fc1.bias", wide, tp_dim=0, tp_stride=stride, expert=expert)
        yield place.matrix("linear_fc2.weight", hidden, self.width, adds=True, tp_dim=1, expert=expert)
        if self.bias:
            yield place.vector("linear_fc2.bias", hidden, sequence_parallel=expert is None, expert=expert)
        for name, value in XIELU_BEGINNINGS.items() if self.activation == "xielu" else ():
            yield Parameter(f"{place.name}.xielu.{name}", (1,), place.stage, "constant", value)

    def state(self, place: Place) -> Iterator[State]:
        """Yield the `_extra_state` that megatron-core saves with each linear layer."""
        for name in ("linear_fc1", "linear_fc2"):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return its two products."""
        return self.products_of(share, share.tokens, share.tensor)

    def products_of(self, share: Share, rows: float, ranks: int, hidden: int | None = None) -> list[Product]:
        """Return the products for this number of tokens, on one of the ranks that divide the width."""
        width, hidden = self.width / ranks, hidden or share.hidden
        return [Product(rows, (1 + self.gated) * width, hidden), Product(rows, hidden, width)]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of the activations between the matrices."""
        return {"mlp": self.inside(share, gated=4) * share.tokens / share.tensor}

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the sum of the gradients of xIELU's numbers, which ranks have of their own channels."""
        if self.activation == "xielu" and share.tensor > 1:
            both = 2 * (share.tensor - 1) / share.tensor * 2 * share.width
            yield Exchange("tp", "all-reduce", 0.0, both, (0, 1), "m {layers} 2 (t-1)/t 2 w", "mlp")

    def inside(self, share: Share, *, gated: int) -> float:
        """Return the bytes per token of activations inside the MLP, undivided; `gated`: number of widths that a gate
        keeps on a CPU."""
        is_short = self.keeps_its_input_alone or (share.fused and self.activation == "silu")
        times = (3 if is_short else gated) if self.gated else 2
        return times * self.width * share.width


def mlp_of(model: ModelConfig, width: int) -> Mlp:
    """Return the model's MLP of this width."""
    gate = model.activation_func_clamp_value, model.glu_linear_offset, (model.mlp_multipliers or (1.0,))[0]
    return Mlp(model.gated_linear_unit, _activation(model), width, model.has_mlp_bias, *gate)


_SWITCHES: dict[str, Activation] = {
    **{"swiglu": "silu", "relu": "relu", "squared_relu": "squared_relu", "quick_geglu": "quick_gelu", "xielu": "xielu"}
}


def _activation(model: ModelConfig) -> Activation:
    for switch, activation in _SWITCHES.items():
        if getattr(model, switch):
            return activation
    return "gelu_tanh" if model.openai_gelu else "gelu"


def draw(random: Random) -> list[str]:
    """Return flags of MLPs, drawn at random."""
    gated = (
        "--swiglu",
        "--swiglu",
        "--geglu",
        "--geglu --openai-gelu",
        "--quick-geglu --activation-func-clamp-value 2",
    )
    others = ("--openai-gelu", "--xielu", "--relu", "--squared-relu", "--quick-geglu --glu-linear-offset 1")
    return [
        *taken(random, (0.85, random.choice((*gated, *others)))),
        *taken(random, (0.4, "--ffn-hidden-size 96"), (0.15, "--add-mlp-bias"), (0.1, "--mlp-multipliers 0.9 0.6")),
    ]
