"""Computes which source each sample of a blend comes from: nothing is stored, and any position is reached at once.

    blend = Mixture((0.3, 0.7))
    blend.source_at(10)      # (1, 7): sample 10 of the blend is sample 7 of source 1
    blend.counts(10)     # [3, 7]: samples 0 to 9 hold three of source 0 and seven of source 1

The sources are the leaves of a balanced binary tree. A node with shares l and r of its samples has sent floor(n l / (l
+ r) + 1/2) of its first n samples to the left, as Bresenham draws a line. The arithmetic is exact, with integers. Each
level rounds by at most 1/2, so that for every n each source is within `Mixture.error` samples of its share.
"""

import math
from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """A blend of sources.

    Args:
        weights: positive, one for each source; they need not sum up to 1. A float is taken as the decimal number that
            it prints as.
    """

    def __init__(self, weights: Sequence[float]):
        assert weights
        assert all(weight > 0 for weight in weights)
        shares = [Fraction(repr(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._sums = [0]  # sum of the weights before each source, in units of 1 / scale
        for share in shares:
            self._sums.append(self._sums[-1] + int(share * scale))
        self.error = math.ceil(math.log2(len(weights))) / 2
        """Number of samples by which a source can differ from its share, at any position."""

    def source_at(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and the sample's number among the samples of this source."""
        first, end = 0, len(self._sums) - 1
        while end - first > 1:
            middle = (first + end) // 2
            before = self._to_the_left(index, first, middle, end)
            if self._to_the_left(index + 1, first, middle, end) > before:
                index, end = before, middle
            else:
                index, first = index - before, middle
        return first, index

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source."""
        counts = [0] * (len(self._sums) - 1)

        def share_out(samples: int, first: int, end: int) -> None:
            if end - first == 1:
                counts[first] = samples
                return
            middle = (first + end) // 2
            left = self._to_the_left(samples, first, middle, end)
            share_out(left, first, middle)
            share_out(samples - left, middle, end)

        share_out(samples, 0, len(counts))
        return counts

    def _to_the_left(self, samples: int, first: int, middle: int, end: int) -> int:
        left, both = (self._sums[bound] - self._sums[first] for bound in (middle, end))
        return (2 * samples * left + both) // (2 * both)
