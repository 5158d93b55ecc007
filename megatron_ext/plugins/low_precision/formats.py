"""Number formats of a product's factors, and recipes: which product takes which format. No torch.

    recipe = recipe_of(config)
    recipe.forward.left.block        # Block(1, 32): an activation's scales are for 32 elements of a token

A format says which part of a matrix has one scale, in which type the elements and the scales are, and how elements are
rounded; `quantize.py` computes every format from these facts alone. Of Y = X W^T there are three products, which each
sum over the columns of their two factors: Y itself, the input gradient dX = dY W, and the weight gradient
dW = dY^T X.

Sources: E4M3 and E5M2 of Micikevicius et al. 2022 (arXiv:2209.05433); blocks of 128 of DeepSeek-V3 (arXiv:2412.19437,
section 3.3); MX of the OCP Microscaling Formats specification 1.0; NVFP4 training of NVIDIA 2025 (arXiv:2509.25149).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megatron_ext.config.schema import Config, flags_of
from megatron_ext.parts.stack import stack
from megatron_ext.plugins.low_precision.flags import LowPrecisionFlags


class Block(NamedTuple):
    """The part of a matrix that has one scale, in rows and columns; None stands for all of them."""

    rows: int | None
    columns: int | None

    @property
    def turned(self) -> "Block":
        """This block in the transposed matrix."""
        return Block(self.columns, self.rows)


@dataclass(frozen=True)
class Element:
    """A floating-point type of few bits."""

    name: str
    """Name of torch's dtype."""

    bits: int
    largest: float
    mantissa: int
    """Bits of the mantissa that are stored."""

    least: int
    """Exponent of the smallest normal number; numbers below have the same spacing."""

    @property
    def exponent(self) -> int:
        """Exponent of the largest number."""
        return int(self.largest).bit_length() - 1


E4M3 = Element("float8_e4m3fn", 8, 448.0, 3, -6)
E5M2 = Element("float8_e5m2", 8, 57_344.0, 2, -14)
E2M1 = Element("float4_e2m1fn_x2", 4, 6.0, 1, 0)

Scale = Literal["fp32", "power of two", "e8m0 up", "e8m0 down", "e4m3"]
"""Type of the scales. fp32: largest value of the block over the element's; power of two: this, rounded up, in fp32;
e8m0 up: the same in eight bits of exponent; e8m0 down: OCP's, the power of two in the largest value over the one in
the element's, so that the largest values may be clamped; e4m3: this over one scale in fp32 of the whole tensor, which
brings the largest block's scale to 448."""


@dataclass(frozen=True)
class Format:
    """Number format of one factor of a product."""

    block: Block
    """Block of the factor, whose columns are summed over."""

    element: Element = E4M3
    scale: Scale = "fp32"
    stochastic: bool = False
    """Whether elements are rounded up with the probability that makes the mean exact, and not to the nearest."""

    rotated: bool = False
    """Whether each 16 columns are first multiplied by a Hadamard matrix with random signs, which cancels in the
    product if both factors are."""

    @property
    def turned(self) -> "Format":
        """This format for the transposed matrix."""
        return replace(self, block=self.block.turned)

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the whole tensor has a scale besides the scales of blocks."""
        return self.scale == "e4m3"

    @property
    def multiple(self) -> int:
        """Divisor of both sides of any matrix: blocks are whole, and matrix units of a GPU read rows of 16 bytes."""
        return max(16 * 8 // self.element.bits, self.block.rows or 1, self.block.columns or 1)


class Pair(NamedTuple):
    """The formats of the two factors of one product."""

    left: Format
    right: Format


class Recipe(NamedTuple):
    """The formats of the three products of a linear layer."""

    forward: Pair
    """X and W."""

    input_gradient: Pair
    """dY and W^T, which is summed over the rows of W."""

    weight_gradient: Pair
    """dY^T and X^T, which are summed over tokens."""

    @property
    def multiple(self) -> int:
        """Divisor that both sides of every matrix must have."""
        return max(format.multiple for pair in self for format in pair)

    @property
    def rounds_weights_once(self) -> bool:
        """Whether the forward product and the input gradient multiply by the same rounded weight, in eight bits, whose
        scales follow from its blocks alone."""
        forward, backward = self.forward.right, self.input_gradient.right
        return forward == backward.turned and forward.element.bits == E4M3.bits and not forward.has_tensor_scale

    @property
    def summed_block(self) -> int | None:
        """Tokens of one block in the weight gradient; None where a scale is for all tokens of a microbatch."""
        return self.weight_gradient.right.block.columns

    @property
    def is_random(self) -> bool:
        """Whether its rounding draws random numbers."""
        return any(format.stochastic or format.rotated for pair in self for format in pair)


def _recipe(activations: Format, weights: Format, gradients: Element) -> Recipe:
    """Return the recipe in which every product has the same blocks."""
    of_output = replace(activations, element=gradients)
    return Recipe(Pair(activations, weights), Pair(of_output, weights), Pair(of_output, activations))


def _alike(block: Block, weights: Block | None = None, element: Element = E4M3, scale: Scale = "fp32") -> "_Kind":
    return _Kind(Format(block, element, scale), Format(weights or block, element, scale))


class _Kind(NamedTuple):
    activations: Format
    weights: Format


BLOCK = 128
"""Side of a block of --fp8-recipe blockwise."""

ROTATED = 16
"""Rows of the Hadamard matrix: as many elements as a block of NVFP4."""

_KINDS = {
    "tensorwise": _alike(Block(None, None)),
    "rowwise": _alike(Block(1, None)),
    "blockwise": _alike(Block(1, BLOCK), Block(BLOCK, BLOCK), scale="power of two"),
    "mxfp8": _alike(Block(1, 32), scale="e8m0 up"),
    "mxfp4": _alike(Block(1, 32), element=E2M1, scale="e8m0 down"),
}
NVFP4, NVFP4_OF_WEIGHTS = Format(Block(1, 16), E2M1, "e4m3"), Format(Block(16, 16), E2M1, "e4m3")
"""Weights have square blocks, so that forward and backward passes multiply by the same numbers."""

RECIPES = (*_KINDS, "nvfp4")
"""Values of --fp8-recipe and --fp4-recipe."""


def recipe(name: str, gradients: Element) -> Recipe:
    """Return a recipe by the value of its flag; `gradients`: elements of output gradients in FP8."""
    if name == "nvfp4":
        drawn, turned = replace(NVFP4, stochastic=True), replace(NVFP4, rotated=True)
        return Recipe(
            Pair(NVFP4, NVFP4_OF_WEIGHTS),
            Pair(drawn, NVFP4_OF_WEIGHTS),
            Pair(replace(drawn, rotated=True), turned),
        )
    kind = _KINDS[name]
    return _recipe(*kind, gradients if kind.activations.element is E4M3 else kind.activations.element)


def asked(config: Config) -> str | None:
    """Return the flag that asks for products in few bits, with its value; None without."""
    flags = flags_of(config.training, LowPrecisionFlags)
    if flags.fp8_format is not None:
        return f"--fp8-format {flags.fp8_format}"
    return None if flags.fp4_format is None else f"--fp4-format {flags.fp4_format}"


def with_recipe(config: Config, between: str = " ") -> str:
    """Return that flag and the flag of the recipe, with their values."""
    flags = flags_of(config.training, LowPrecisionFlags)
    recipe = f"--fp4-recipe {flags.fp4_recipe}" if flags.fp8_format is None else f"--fp8-recipe {flags.fp8_recipe}"
    return f"{asked(config)}{between}{recipe}"


def recipe_of(config: Config) -> Recipe:
    """Return the recipe that the flags choose."""
    flags = flags_of(config.training, LowPrecisionFlags)
    name = flags.fp4_recipe if flags.fp8_format is None else flags.fp8_recipe
    return recipe(name, E5M2 if flags.fp8_format == "hybrid" else E4M3)


def gathers_whole(config: Config) -> str | None:
    """Return why --fp8-param-gather changes nothing, with what does; None where weights are gathered in FP8."""
    flags = flags_of(config.training, LowPrecisionFlags)
    if not recipe_of(config).rounds_weights_once:
        return (
            f"--fp8-recipe {flags.fp8_recipe} rounds a weight along its rows for one product and along its columns for "
            "another, which together have as many bytes as in bf16; use --fp8-recipe tensorwise or blockwise"
        )
    return config.layout.sharding.gathers_whole(config)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter of a chosen layer is multiplied in few bits: projections to latents are not."""
    return "linear_" in name and len(shape) == 2 and "down_proj" not in name


def gathers_in_eight_bits(config: Config, shape: Sequence[int]) -> bool:
    """Return whether a chosen layer's weight is gathered in FP8. One whose rows a scheme does not divide equally,
    and pads, is gathered in bf16.

    Args:
        shape: its shape on a rank, before it is divided over data-parallel ranks.
    """
    layout = config.layout
    if not flags_of(config.training, LowPrecisionFlags).fp8_param_gather or gathers_whole(config) is not None:
        return False
    ranks = layout.data_parallel_size * layout.context_parallel_size // layout.num_distributed_optimizer_instances
    return not layout.sharding.equal_rows or shape[0] % ranks == 0


def chosen_layers(config: Config) -> range:
    """Return the numbers, from 0, of the layers whose linear layers and experts multiply in few bits. Depths of
    multi-token prediction, whose layers come after the last, are chosen with any other."""
    flags = flags_of(config.training, LowPrecisionFlags)
    if asked(config) is None:
        return range(0)
    count = stack(config).count(lambda layer: layer.next_token is None)
    if not flags.first_last_layers_bf16:
        return range(count)
    return range(flags.num_layers_at_start_in_bf16, count - flags.num_layers_at_end_in_bf16)
