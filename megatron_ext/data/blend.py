"""--data-path and its kin: prefixes of .bin/.idx files, each optionally after its weight."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Blend:
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(words: Sequence[str]) -> Blend:
    """Read `w1 p1 w2 p2 ...`, or `p1 p2 ...` where the first, third, ... word are not all numbers (Megatron's rule)."""
    if len(words) % 2 == 0:
        try:
            return Blend(tuple(words[1::2]), tuple(float(word) for word in words[::2]))
        except ValueError:
            pass
    return Blend(tuple(words))
