"""The description of a part of a layer, without torch: everything that the rest of the program asks of a part.

A part is a norm, an MLP, a mixture of experts, attention, or another mixer: a frozen description with the methods of
`Part`, in `parts/<kind>/describe.py`, next to its operation in `compute.py`. The catalogue, FLOPs, activations,
traffic and the planner sum over the parts of the layers (`parts/stack.py`) and know no kind of part.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.ways import Asked


@dataclass(frozen=True)
class Place:
    """Place of a part in the model, and the initialization of its parameters."""

    name: str
    """Global name of the module, `decoder.layers.3.mlp`."""

    stage: int | Literal["embedding", "output"]
    """Index of the layer, or an end of the model."""

    model: ModelConfig
    residual_std: float
    """Standard deviation of matrices whose products are added to the residual stream."""

    experts: Iterable[int] | None = None
    """The routed experts to name, in place of all."""

    def inside(self, name: str) -> "Place":
        """Return the place of a module of the part."""
        return replace(self, name=f"{self.name}.{name}")

    def matrix(self, name: str, rows: int, columns: int, *, adds: bool = False, **divided: Any) -> Parameter:
        """Return a matrix, initialized normally with the model's standard deviation, or with `residual_std` where its
        product `adds` to the residual stream."""
        init = matrix_init(self.model, (rows, columns), self.residual_std if adds else None)
        return Parameter(f"{self.name}.{name}", (rows, columns), self.stage, *init, **{"by_element": False, **divided})

    def vector(
        self, name: str, size: int, init: Literal["ones", "zeros", "time-step"] = "zeros", **divided: Any
    ) -> Parameter:
        """Return a vector, such as a bias."""
        return Parameter(f"{self.name}.{name}", (size,), self.stage, init, **divided)


def matrix_init(
    model: ModelConfig, shape: tuple[int, int], std: float | None = None
) -> tuple[Literal["normal", "uniform"], float]:
    """Return the initialization of a matrix: normal, or uniform up to sqrt(6 / (rows + columns)) (Glorot and Bengio
    2010, equation 16), whose standard deviation is 1 / sqrt(3) of this bound.

    Args:
        std: standard deviation of a normal initialization; default: the one of the layers' matrices.
    """
    if model.init_method_xavier_uniform:
        return "uniform", math.sqrt(2.0 / sum(shape))
    return "normal", model.matrix_std if std is None else std


def taken(random: Random, *choices: tuple[float, str]) -> list[str]:
    """Return the flags that a draw takes for the comparison of random layouts (`plugins/prove/draws.py`): of each pair
    the flags, with the probability before them."""
    return [flags for probability, flags in choices if random.random() < probability]


class Compared(NamedTuple):
    """Models with a kind of part, and the layouts in which they are compared with one process: a plugin brings it to
    the extension point `comparisons`."""

    models: Mapping[str, str]
    """Name -> flags of the model's shape."""

    layouts: Mapping[str, tuple[int, str]]
    """Name, which ends with the model's -> ranks and flags."""

    quick: Collection[str]
    """Names of the layouts that every run of the tests has."""


@dataclass(frozen=True)
class State:
    """State that a part keeps and saves besides its parameters."""

    name: str
    """Global name, `decoder.layers.3.mlp.router.expert_bias`."""

    kind: Literal["buffer", "extra"]
    """A tensor of the module, or an object that megatron-core saves with a linear layer, which is empty without
    FP8 of Transformer Engine."""

    shape: tuple[int, ...] = ()


class Share:
    """Sizes of one rank's share of one microbatch, from a resolved configuration, for the formulas of parts.

    Args:
        fused: whether one kernel computes SwiGLU, and another RMSNorm, and dropout masks are bytes: on GPUs.
    """

    def __init__(self, config: Config, *, fused: bool = False):
        layout, model, training = config.layout, config.model, config.training
        self.config, self.fused = config, fused
        self.hidden, self.length = model.hidden_size, model.seq_length
        self.width = training.params_bytes
        """Bytes of a weight or an activation."""
        self.tensor, self.context = layout.tensor_model_parallel_size, layout.context_parallel_size
        self.divided = self.tensor if layout.sequence_parallel else 1
        """Ranks among which activations between the blocks are divided."""
        self.experts, self.expert_tensor = layout.expert_model_parallel_size, layout.expert_tensor_size
        self.tokens = self.length // self.context * training.micro_batch_size
        self.stream = self.width * self.tokens * self.hidden / self.divided
        """Bytes of one residual stream."""


class Product(NamedTuple):
    """Matrix products of one size in a forward pass of one microbatch: (M, K) by (K, N)."""

    rows: float
    """M: tokens."""

    columns: float
    """N: channels of the output."""

    inner: float
    """K: channels of the input."""

    number: float = 1
    routed: bool = False
    """Whether routing chooses the rows: ranks then wait for the one that was given most."""

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass, a multiplication and an addition counted as two."""
        return 2.0 * self.number * self.rows * self.columns * self.inner

    def backward(self) -> "tuple[Product, Product]":
        """Return the product that gives the input's gradient, and the one that gives the weight's."""
        return self._replace(columns=self.inner, inner=self.columns), self._replace(rows=self.inner, inner=self.rows)


class Core(NamedTuple):
    """Costs of a mixer between its projections, in a forward pass of one microbatch."""

    flops: float
    """Floating-point operations in one kernel."""

    again: float
    """Backward FLOPs divided by forward FLOPs."""

    written_out: float
    """FLOPs of the forward pass where no kernel fuses it."""

    inner: float
    """Terms of each sum in these products."""

    scores: float
    """Elements written to memory and read between these products."""


@dataclass(frozen=True)
class Exchange:
    """Message of a part of one layer for one microbatch, in one kind of collective."""

    axis: str
    """Ranks that exchange it: tp, cp or ep."""

    collective: str
    forward: float
    """Bytes of a forward pass, which recomputation repeats."""

    backward: float
    """Bytes of a backward pass, or of messages that nothing repeats."""

    calls: tuple[float, float]
    """Number of collectives in each of the two."""

    formula: str
    """The bytes in symbols: `{layers}` stands for the number of times that the L layers count, `{times}` for this
    number without the L, `{twice}` for two times the number of calls."""

    repeated_with: Literal["core", "mixer", "mlp"]
    """Part of the layer with whose recomputation it is repeated."""


@dataclass(frozen=True)
class Number:
    """A number that parts report of every training step, over the global batch (`parts/numbers.py` adds it up)."""

    name: str
    """Its field in the metrics file."""

    mean: Literal["of microbatches", "of tokens", "largest"]
    """Reduction of all recorded numbers to one: the mean over the parts that report it and the microbatches, the sum
    over the number of tokens that count in the loss, or the largest."""

    unit: str
    """Empty for a number without a unit."""

    tag: str
    """Its tag in TensorBoard and other trackers."""

    title: str | None = None
    """Its name in the log line; None: it is not in the line. Means follow the loss, and largest numbers the norms."""

    def of(self, total: float, parts: int, microbatches: int, tokens: int) -> float:
        """Return the number; NaN for a mean over no tokens.

        Args:
            total: sum, or largest, of the numbers that all ranks have recorded in the step.
            parts: parts of the model that report it.
            microbatches: microbatches of the global batch.
            tokens: tokens of the global batch that count in the loss.
        """
        if self.mean == "largest":
            return total
        count = parts * microbatches if self.mean == "of microbatches" else tokens
        return total / count if count else math.nan


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a logged step by parts, besides single numbers."""

    row: Mapping[str, Any]
    """Fields of the metrics file."""

    tags: Mapping[str, float]
    """Tags of TensorBoard and other trackers, with their values."""

    pictures: Mapping[str, Any] = field(default_factory=dict)
    """Titles of pictures, with their pixels: red, green and blue, uint8 [height, width, 3]."""


class Part:
    """A part that adds its output to the residual stream. Parts of one kind are equal, and hash alike.

    What a kind does not say is as here: it has no state, sends nothing of its own, computes products alone, and every
    configuration can compute it.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    """Names of the modules that hold its parameters, in the order of a forward pass."""

    builder: ClassVar[str] = ""
    """"module:function" that builds the spec of a mixer's module: from the description, the tensor-parallel group and
    the columns of the table of angles that the layer reads."""

    keeps_a_state: ClassVar[bool] = False
    """Whether generation keeps a state in the place of keys and values, of which no token can be taken back."""

    joined: ClassVar[int] = 0
    """Number of its `blocks` that scatter their output together with another one."""

    @property
    def blocks(self) -> int:
        """Number of times that tensor-parallel ranks gather its input and scatter its output."""
        return 1

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the parameters, in the order of a forward pass."""
        raise NotImplementedError

    def state(self, place: Place) -> Iterator[State]:
        """Yield the state that is kept and saved besides parameters."""
        yield from ()

    def products(self, share: Share) -> list[Product]:
        """Return the matrix products of a rank."""
        raise NotImplementedError

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes that a rank holds between the passes, by name; `core` is dropped where
        --recompute-modules has core_attn, `mlp` where it has mlp."""
        raise NotImplementedError

    def gradients(self, share: Share) -> float:
        """Return the bytes of gradients that exist at once in its backward pass."""
        return max(self.held(share).values())

    def computed_again(self, share: Share) -> float:
        """Return the bytes held for a while in its backward pass, of activations that this recomputes in any case."""
        return 0.0

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield a rank's exchanges, besides gathering the part's input and scattering its output."""
        yield from ()

    def core_flops(self, length: int) -> float:
        """Return the floating-point operations of one token, forward, besides products with weights."""
        return 0.0

    def core(self, share: Share) -> Core | None:
        """Return the costs of a rank's microbatch between the projections; None where the part has none."""
        return None

    def pieces(self, config: Config) -> Mapping[str, Asked]:
        """Return the pieces that it asks for and that not every way of computing it has (`parts/ways.py`)."""
        return {}

    def numbers(self, config: Config) -> Iterator[Number]:
        """Yield the numbers that it reports of a training step."""
        yield from ()

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield why this configuration cannot compute it in any way, each with a setting that works."""
        yield from ()


GatheredBytes = Callable[[Parameter, int | None, tuple[int, ...]], int | None]
"""From a parameter, the number of its layer (None of a depth of multi-token prediction) and its shape on a rank, before
data-parallel ranks divide it, to bytes of an element."""


class ProductFormats:
    """Formats in which a plugin has linear layers and experts multiply while they are trained, brought to the extension
    point `product_formats`."""

    def asked(self, config: Config) -> str | None:
        """Return the flag that asks for them, with its value; None where none does."""
        raise NotImplementedError

    def missing(self, config: Config, device: Any) -> str | None:
        """Return why a rank's device (`device.device_protocol.Device`) cannot multiply so, with a setting that works;
        None where it can."""
        raise NotImplementedError

    def described(self, config: Config) -> list[str]:
        """Return the lines of --dry-run about them."""
        raise NotImplementedError

    def bits(self, config: Config) -> tuple[float, tuple[int, int, int]] | None:
        """Return the share of the layers that multiply so, and the bits of the factors of the forward product, the
        input gradient and the weight gradient; None where no flag asks for it."""
        raise NotImplementedError

    def gathered_bytes(self, config: Config) -> GatheredBytes | None:
        """Return what says of a layer's parameter how many bytes an element has when data-parallel ranks gather it
        rounded, and None of one that is gathered as it is; None where all are."""
        raise NotImplementedError

    def install(self, chunk: Any, config: Config, groups: Any) -> None:
        """Have the layers of a model chunk multiply so, where the flags ask for it. Imports torch.

        Args:
            chunk: a module with this rank's layers.
            groups: the rank's `ProcessGroupCollection`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Depth(Part):
    """Modules around the transformer layers of one depth of multi-token prediction. Its `builder` takes the norm, the
    specs of these layers, and whether they have letters."""

    depth: int = field(compare=False)
    """Index of the depth, from 0."""

    place: int | None = field(default=None, kw_only=True)
    """Index of the layer among those of the depth; None where the depth is one layer without letters."""

    repeats: bool = field(default=False, kw_only=True)
    """Whether the depth is the first one applied once more, and has no parameters of its own."""

    @property
    def begins(self) -> bool:
        """Whether the layer is the first of the depth, which stands for the modules around them all."""
        return not self.place

    @property
    def name(self) -> str:
        """Global name of its module."""
        return f"mtp.layers.{0 if self.repeats else self.depth}"
