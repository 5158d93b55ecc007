"""Lists the matrix products that a rank computes in the forward pass of one microbatch, with their sizes.

A product of an (M, K) by a (K, N) matrix costs 2 M N K operations. Its backward pass is two products of as many
operations: (M, N) by (N, K) for the input's gradient, and (K, M) by (M, N) for the weight's. How near a product comes
to the peak depends on its sizes (`plan/kernels.py`): tensor parallelism makes N or K smaller, context parallelism and
experts make M smaller.
"""

from typing import NamedTuple

from megatron_ext.config.schema import Config
from megatron_ext.parts.stack import Attention, Experts, Layer, Mlp
from megatron_ext.plan.shapes import Shapes


class Product(NamedTuple):
    """Products of one size in a forward pass."""

    rows: float
    """M: tokens."""

    columns: float
    """N: channels of the output."""

    inner: float
    """K: channels of the input."""

    number: float = 1

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass, a multiplication and an addition counted as two."""
        return 2.0 * self.number * self.rows * self.columns * self.inner

    def backward(self) -> "tuple[Product, Product]":
        """Return the product that gives the input's gradient, and the one that gives the weight's."""
        rows, columns, inner, number = self
        return Product(rows, inner, columns, number), Product(inner, columns, rows, number)


class Products:
    """The products of one resolved configuration."""

    def __init__(self, config: Config, shapes: Shapes):
        model, layout = config.model, config.layout
        self.hidden, self.tensor = model.hidden_size, layout.tensor_model_parallel_size
        self.experts, self.expert_tensor = layout.expert_model_parallel_size, layout.expert_tensor_size
        self.tokens = model.seq_length // layout.context_parallel_size * config.training.micro_batch_size
        self.table = shapes.table // model.hidden_size

    def attention(self, attention: Attention) -> list[Product]:
        """Return the projections of an attention block."""
        # A rank has at least one group of keys and values, so that they are repeated where there are fewer of them.
        keys = max(attention.groups // self.tensor, 1) * (attention.head_size + attention.value_head_size)
        queries = attention.query_size // self.tensor
        return [
            Product(self.tokens, queries + keys, self.hidden),
            Product(self.tokens, self.hidden, attention.context_size // self.tensor),
        ]

    def mlp(self, layer: Layer) -> list[Product]:
        """Return the products of the MLP, or of the router and the shared experts."""
        experts = layer.experts
        if experts is None:
            return self._of(layer.inner, self.tokens, self.tensor)
        shared = [] if experts.shared is None else self._of(experts.shared, self.tokens, self.tensor)
        return [Product(self.tokens / self.tensor, experts.count, self.hidden), *shared]

    def routed(self, experts: Experts) -> list[Product]:
        """Return the products of the routed experts that the rank has; an even load is assumed."""
        own = self.tokens / self.tensor
        each = own * experts.top_k * self.experts * self.expert_tensor / experts.count
        held = experts.count / self.experts
        return [product._replace(number=held) for product in self._of(experts.mlp, each, self.expert_tensor)]

    def output(self) -> Product:
        """Return the output layer's."""
        return Product(self.tokens, self.table, self.hidden)

    def _of(self, mlp: Mlp, rows: float, shared: int) -> list[Product]:
        width = mlp.width / shared
        into = (1 + mlp.gated) * width
        return [Product(rows, into, self.hidden), Product(rows, self.hidden, width)]
