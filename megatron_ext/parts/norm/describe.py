"""Describes a normalization of the last dimension."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Place, Share, taken

_FP32 = 4


@dataclass(frozen=True)
class Norm:
    """A normalization of the last dimension."""

    kind: Literal["LayerNorm", "RMSNorm"]
    epsilon: float
    owns: Literal["all", "weight", "none"] = "all"
    """Whether it has a weight and the bias of its kind, a weight alone, or nothing."""

    @property
    def has_weight(self) -> bool:
        """Whether it has a weight."""
        return self.owns != "none"

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""
        return self.kind == "LayerNorm" and self.owns == "all"

    def parameters(self, place: Place, width: int) -> Iterator[Parameter]:
        """Yield the parameters of a norm of `width` channels."""
        if self.has_weight:
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


def draw(random: Random) -> list[str]:
    """Return flags of norms, drawn at random."""
    kinds = (
        "RMSNorm",
        "RMSNorm",
        "LayerNorm",
        "LayerNorm --norm-parameters weight",
        "LayerNorm --norm-parameters none",
        "RMSNorm --norm-parameters none",
    )
    places = [f"--norm-position {random.choice(('after', 'both', 'after-attention', 'after-experts'))}"]
    places += [f"--parallel-residual {random.choice(('one-norm', 'two-norms'))}"]
    return [
        f"--normalization {random.choice(kinds)}",
        *taken(random, (0.3, random.choice(places)), (0.3, "--norm-epsilon 1e-3"), (0.1, "--embed-layernorm")),
    ]
