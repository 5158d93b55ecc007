"""Describes one parameter of the model; the catalogue (`parts/catalogue.py`) is a list of them."""

import math
from dataclasses import dataclass
from typing import Literal

type Init = Literal["normal", "uniform", "ones", "zeros", "constant", "log-uniform", "log-count", "time-step"]
"""Initialization of a parameter; log-uniform: as logarithms of uniform numbers from 1 to 16; log-count: as the
logarithms of 1, 2, 3 ... in every row; time-step: so that softplus of it is a number from 0.001 to 0.1 whose logarithm
is uniform."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    """Shape in the whole model, vocabulary padding included."""

    stage: int | Literal["embedding", "output"]
    """Index of the layer that it belongs to, or the first or last pipeline stage."""

    init: Init
    """Initialization of the parameter."""

    std: float = 0.0
    """Standard deviation of a normal or uniform initialization; of a constant one, the value."""

    tp_dim: int | None = None
    """Dimension that tensor parallelism divides; None when every rank holds the whole."""

    tp_stride: int = 1
    """2 for SwiGLU's first matrix: a rank's shard is its part of the gate above its part of the up projection."""

    true_rows: int | None = None
    """Rows that stand for entries of the vocabulary; those after them are padding, and zero. None: no padding."""

    sequence_parallel: bool = False
    """Whether, under sequence parallelism, each rank sees the gradient of its own tokens only, so that it must be
    summed over the tensor-parallel ranks. (Those of the query and key norms, whole on every rank, are summed in
    any case.)"""

    expert: int | None = None
    """Index of the routed expert that it is part of. Its shards lie on the expert-tensor-parallel ranks."""

    sections: tuple[int, ...] = ()
    """Rows of each matrix of which it is several, one above another, again and again: queries, keys and values of one
    group of heads after another. Empty: it is one."""

    by_element: bool | None = None
    """Whether the two dimensions of a layer's parameter are no channels, so that it is updated element by element and
    not as a matrix. None: nobody has said so, and an optimizer of whole matrices is refused."""

    never_decays: bool = False
    """Whether weight decay leaves it out although it has several dimensions."""

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: it is for matrices; norms and biases have none, unless
        --apply-wd-to-qk-layernorm gives it to the norms of queries and keys."""
        return len(self.shape) > 1 and not self.is_query_or_key_norm and not self.never_decays

    @property
    def is_query_or_key_norm(self) -> bool:
        """Whether it belongs to a norm of queries (or of their latents) or keys, by Megatron's names."""
        return self.name.split(".")[-2:-1] in (["q_layernorm"], ["k_layernorm"])

    @property
    def update(self) -> Literal["matrix", "element"]:
        """Unit of an optimizer's update: "matrix" for matrices of layers whose rows and columns are both channels;
        "element" for embeddings, the output layer, norms, biases and routers."""
        is_matrix = len(self.shape) == 2 and isinstance(self.stage, int) and not self.by_element
        return "matrix" if is_matrix else "element"

    @property
    def update_is_unknown(self) -> bool:
        """Whether nothing says if it is updated as a matrix or element by element."""
        return self.update == "matrix" and self.by_element is None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def local_shape(self, tensor_model_parallel_size: int) -> tuple[int, ...]:
        """Return the shape of one tensor-parallel rank's shard."""
        shape = list(self.shape)
        if self.tp_dim is not None:
            shape[self.tp_dim] //= tensor_model_parallel_size
        return tuple(shape)
