"""Lists the matrix products that a rank computes in the forward pass of one microbatch, with their sizes.

A product of an (M, K) by a (K, N) matrix costs 2 M N K operations. Its backward pass is two products of as many
operations: (M, N) by (N, K) for the input's gradient, and (K, M) by (M, N) for the weight's. How near a product comes
to the peak depends on its sizes (`plan/kernels.py`): tensor parallelism makes N or K smaller, context parallelism and
experts make M smaller.
"""

from megatron_ext.config.schema import Config
from megatron_ext.parts.protocol import Part, Product, Share
from megatron_ext.plan.shapes import Shapes


class Products:
    """The products of one resolved configuration."""

    def __init__(self, config: Config, shapes: Shapes):
        self.share = Share(config)
        self.table = shapes.table // config.model.hidden_size

    def of(self, part: Part | None) -> list[Product]:
        """Return the products of a part of a layer; an even load of experts is assumed."""
        return [] if part is None else part.products(self.share)

    def output(self) -> Product:
        """Return the output layer's."""
        return Product(self.share.tokens, self.table, self.share.hidden)
