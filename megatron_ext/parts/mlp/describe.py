"""Describes an MLP: two matrices with an activation between them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_ext.config.schema import ModelConfig
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Part, Place, Product, Share, State

Activation = Literal["silu", "gelu", "gelu_tanh", "squared_relu"]


@dataclass(frozen=True)
class Mlp(Part):
    """Two matrices with an activation between them."""

    modules = ("linear_fc1", "linear_fc2")

    gated: bool
    """The first matrix has two halves, of which the activation of one multiplies the other."""

    activation: Activation
    width: int
    bias: bool

    def parameters(self, place: Place, expert: int | None = None) -> Iterator[Parameter]:
        """Yield both matrices, of a routed expert where it is one."""
        model, (wide, stride) = place.model, (2 * self.width, 2) if self.gated else (self.width, 1)
        yield place.matrix("linear_fc1.weight", wide, model.hidden_size, tp_dim=0, tp_stride=stride, expert=expert)
        if self.bias:
            yield place.vector("linear_fc1.bias", wide, tp_dim=0, tp_stride=stride)
        yield place.matrix("linear_fc2.weight", model.hidden_size, self.width, adds=True, tp_dim=1, expert=expert)
        if self.bias:
            yield place.vector("linear_fc2.bias", model.hidden_size, sequence_parallel=True)

    def state(self, place: Place) -> Iterator[State]:
        """Yield what is saved with each linear layer."""
        for name in ("linear_fc1", "linear_fc2"):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return its two products."""
        return self.products_of(share, share.tokens, share.tensor)

    def products_of(self, share: Share, rows: float, ranks: int) -> list[Product]:
        """Return the products of so many tokens, on one of the ranks that divide the width."""
        width = self.width / ranks
        return [Product(rows, (1 + self.gated) * width, share.hidden), Product(rows, share.hidden, width)]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of what is between the matrices."""
        return {"mlp": self.inside(share, gated=4) * share.tokens / share.tensor}

    def inside(self, share: Share, *, gated: int) -> float:
        """Return the bytes a token of its inside, undivided; `gated`: how many widths a gate keeps on a CPU."""
        times = (3 if share.fused and self.activation == "silu" else gated) if self.gated else 2
        return times * self.width * share.width


def mlp_of(model: ModelConfig, width: int) -> Mlp:
    """Return the model's MLP of this width."""
    return Mlp(model.gated_linear_unit, _activation(model), width, bias=model.has_mlp_bias)


def _activation(model: ModelConfig) -> Activation:
    if model.swiglu:
        return "silu"
    if model.squared_relu:
        return "squared_relu"
    return "gelu_tanh" if model.openai_gelu else "gelu"
