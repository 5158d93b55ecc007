"""Estimates how long the computation of a layer takes on a rank: matrix products by their sizes, attention, and
memory-bound kernels.

A matrix product of M x K by K x N takes 2 M N K / (peak x share) x (1 + e/M) (1 + e/N) (1 + k/K): tiles at the edges
that are not full and blocks of the chip that wait for the last tiles cost e rows and columns more, starting and ending
each tile's sum costs k terms more. Fused attention takes its operations (forward 2 products, backward 5, of the keys
that causality leaves) over its own share of the peak. Everything else is bytes over a share of the bandwidth. On CPU
ranks the program's own calls come on top, which a GPU does not wait for.
"""

from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import Products
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.parts.protocol import Part, Product
from megatron_ext.parts.stack import Layer
from megatron_ext.registry import brought

Passes = tuple[float, float]
"""Seconds of a forward and of a backward pass."""


class Kernels:
    """The seconds of one resolved configuration on a machine, of one microbatch."""

    def __init__(self, config: Config, shapes: Shapes, machine: Machine, *, fsdp: bool):
        self.config, self.constants = config, machine.constants
        self.products = Products(config, shapes)
        share = machine.processes_share(config.layout.world_size)
        peak = machine.devices.peak_flops(config.training) * share
        self.rate = peak * machine.matmul_share
        chosen = next(filter(None, (formats.bits(config) for formats in brought("product_formats"))), None)
        self.low_share, self.low_bits = chosen or (0.0, (0, 0, 0))
        """Share of the layers that multiply in fewer bits, and the bits of the three products."""
        self.gains = tuple(machine.devices.gain(bits) for bits in self.low_bits)
        self.attention_rate = peak * (machine.fsdp_attention_share if fsdp else machine.attention_share)
        self.bandwidth = machine.devices.memory_bandwidth_gb_s * 1e9 * share
        """Memory bandwidth of the data sheet, in bytes a second."""
        self.stream = self.bandwidth * self.constants.stream
        """Bytes a second that long reads and writes reach."""
        self.width = config.training.params_bytes
        self.calls = self.constants.calls_of_a_layer / 2 / share
        """Seconds of the program's calls for both passes of an attention or an MLP."""
        self.calls_of_a_pass = self.constants.calls_of_a_pass / share
        self.calls_of_a_step = self.constants.calls_of_a_step / share
        self.fused = machine.devices.is_gpu and config.model.attention_dropout == 0.0
        self._of_kinds: dict[Layer, tuple[Passes, Passes, Passes]] = {}

    def layer(self, layer: Layer) -> tuple[Passes, Passes, Passes]:
        """Return the seconds of the mixer's projections, of its core, and of the MLP with the further products of a
        depth of multi-token prediction."""
        if layer not in self._of_kinds:
            ahead = self._part(layer.around, low=False)
            forward, backward = map(sum, zip(self._part(layer.mlp), ahead, strict=True))
            self._of_kinds[layer] = self._part(layer.mixer), self._core(layer.mixer), (forward, backward)
        return self._of_kinds[layer]

    def output(self) -> Passes:
        """Return the seconds of the output layer's product."""
        return self._all([self.products.output()])

    def product(self, product: Product) -> float:
        """Return the seconds of products of one size: by operations, but no faster than the weights are read."""
        constants = self.constants
        edge, start = constants.edge, constants.inner
        rows, columns, inner, *_ = product
        waits = (1 + edge / rows) * (1 + edge / columns) * (1 + start / inner)
        return product.flops / self.rate * waits

    def _all(self, products: list[Product], low: bool = False) -> Passes:
        """Return the seconds of some products and of their gradients, each at least the time to read the weights; a
        weight's gradient is added to its sum in fp32, which is read and written.

        Args:
            low: whether they are in fewer bits in some layers; the seconds are then the mean over all layers.
        """
        forward = backward = 0.0
        for product in products:
            weights = product.number * product.columns * product.inner
            of_input, of_weights = product.backward()
            read, added = weights * self.width / self.stream, weights * 8 / self.stream
            seconds = [
                self._mean(one, number if low else None) for number, one in enumerate((product, of_input, of_weights))
            ]
            forward += max(seconds[0], read)
            backward += max(seconds[1], read) + max(seconds[2], added)
        return forward, backward

    def _mean(self, product: Product, number: int | None) -> float:
        """Return the mean seconds of a product over layers with fewer bits, which read both factors, and write and read
        them rounded, and layers without."""
        seconds = self.product(product)
        if number is None or not self.low_share:
            return seconds
        factors = product.number * product.inner * (product.rows + product.columns)
        rounding = factors * (self.width + 2 * self.low_bits[number] / 8) / self.stream
        return seconds + self.low_share * (seconds / self.gains[number] + rounding - seconds)

    def _part(self, part: Part | None, *, low: bool = True) -> Passes:
        """Return the seconds of a part's products, the program's own calls included."""
        if part is None:
            return 0.0, 0.0
        products = self.products.of(part)
        forward, backward = self._all([product for product in products if not product.routed], low)
        if routed := [product for product in products if product.routed]:
            # All wait for the rank whose experts have most tokens.
            most = self.constants.imbalance if self.products.share.experts > 1 else 1.0
            ahead, back = self._all(routed, low)
            forward, backward = forward + most * ahead, backward + most * back
        return with_calls((forward, backward), self.calls)

    def _core(self, mixer: Part | None) -> Passes:
        core = mixer.core(self.products.share) if mixer is not None else None
        if core is None:
            return 0.0, 0.0
        if self.fused:
            length = self.products.share.length
            seconds = core.flops / self.attention_rate * (1 + self.constants.attention_keys / length)
            return seconds, core.again * seconds
        # Each step a kernel of its own.
        square = core.written_out / self.rate * (1 + self.constants.inner / core.inner)
        forward, backward = (passes * self.width * core.scores / self.stream for passes in _UNFUSED)
        return square + forward, 2 * square + backward


def with_calls(passes: Passes, calls: float) -> Passes:
    """Add the seconds of the program's own calls to a forward and a backward pass. The backward pass gets two thirds of
    `calls`: it has two products for one of the forward pass."""
    forward, backward = passes
    return forward + calls / 3, backward + calls * 2 / 3


# Times that the scores are read or written: product, softmax, dropout with its mask of a byte, product; and backward.
_UNFUSED = (6.5, 9.5)
