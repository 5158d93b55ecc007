"""Describes a normalization of the last dimension."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Place, Share

_FP32 = 4


@dataclass(frozen=True)
class Norm:
    """A normalization of the last dimension."""

    kind: Literal["LayerNorm", "RMSNorm"]
    epsilon: float

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""
        return self.kind == "LayerNorm"

    def parameters(self, place: Place, width: int) -> Iterator[Parameter]:
        """Yield the parameters of a norm of `width` channels."""
        yield place.vector("weight", width, "ones", sequence_parallel=True)
        if self.has_bias:
            yield place.vector("bias", width, sequence_parallel=True)

    def held(self, share: Share) -> float:
        """Return the bytes of its output, and of 1/RMS of every token in fp32, or of mean and 1/deviation."""
        numbers = 1 if self.kind == "RMSNorm" else 2
        return share.stream + numbers * _FP32 * share.tokens / share.divided

    def keeps_its_input(self, share: Share) -> bool:
        """Return whether it keeps the tensor that it is given; RMSNorm on a CPU keeps another."""
        return share.fused or self.kind != "RMSNorm"
