"""Random numbers of formats that draw some: a function of the run's seed, a parameter's name, the step, and the place
of a number in the undivided matrix, so that every layout draws the same.

The microbatches of a step draw alike: which of them a rank computes follows from the layout.
"""

import hashlib
from dataclasses import dataclass, field, replace

import torch

from megatron_ext.plugins.low_precision.formats import ROTATED

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Places:
    """Places of a rank's rows or columns in the undivided dimension: equal parts of `stride` tensors one after another,
    or with `mirrored` two chunks, of which the second is as far from the end as the first is from the beginning."""

    rank: int = 0
    ranks: int = 1
    stride: int = 1
    mirrored: bool = False

    def of(self, size: int, device: torch.device) -> torch.Tensor:
        """Return the places of this rank's `size` indices."""
        index = torch.arange(size, device=device)
        if self.mirrored and self.ranks > 1:
            half = size // 2
            second = (2 * self.ranks - 1 - self.rank) * half
            return torch.where(index < half, index + self.rank * half, index - half + second)
        part = size // self.stride
        return index % part + (index // part * self.ranks + self.rank) * part


@dataclass
class _Clock:
    step: int = 0


CLOCK = _Clock()
"""The step that is under way, which a callback sets."""


@dataclass(frozen=True)
class Draw:
    """Random numbers of the output gradient of one parameter."""

    seed: int
    name: str
    """Global name of the parameter."""

    rows: Places = field(default_factory=Places)
    """Places of tokens."""

    columns: Places = field(default_factory=Places)
    """Places of outputs."""

    is_turned: bool = False
    """Whether the matrix has outputs as rows and tokens as columns."""

    @property
    def turned(self) -> "Draw":
        """Return the random numbers for the transposed matrix."""
        return replace(self, rows=self.columns, columns=self.rows, is_turned=not self.is_turned)

    def uniform(self, x_RC: torch.Tensor) -> torch.Tensor:
        """Return a number in [0, 1) for each element, in fp32: a multiple of 2^-24."""
        rows, columns = (
            places.of(size, x_RC.device) for places, size in zip((self.rows, self.columns), x_RC.shape, strict=True)
        )
        tokens, outputs = (columns[None], rows[:, None]) if self.is_turned else (rows[:, None], columns[None])
        bits = _mixed(_mixed(tokens ^ self._key("rounding")) ^ _mixed(outputs + 1))
        return (bits >> 8).float() * 2.0**-24

    def signs(self, device: torch.device) -> torch.Tensor:
        """Return the signs of the Hadamard matrix, 1 or -1 for each of 16 columns."""
        bits = _mixed(torch.arange(ROTATED, device=device) ^ self._key("signs"))
        return 1.0 - 2.0 * (bits >> 31).float()

    def _key(self, purpose: str) -> int:
        text = f"{self.seed}/{self.name}/{CLOCK.step}/{purpose}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return 32 bits, in int64, of each of which every bit of x changes about half (the multipliers of Wellons's
    lowbias32, hash-prospector)."""
    x = x & _MASK
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16
