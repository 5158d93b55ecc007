"""Shares of a blend by formula are exact at every position."""

from collections.abc import Sequence

import pytest

from megatron_ext.data.mixture import Mixture


@pytest.mark.parametrize(
    "weights", [(1.0,), (0.3, 0.7), (1.0, 2.0, 4.0), (0.1,) * 10, (5, 1e-6, 3.3, 7, 11, 0.017, 2), tuple(range(1, 40))]
)
def test_a_blend_is_exact_at_every_position(weights: Sequence[float]):
    blend, counted = Mixture(weights), [0] * len(weights)
    for index in range(2000):
        assert blend.counts(index) == counted
        for weight, count in zip(weights, counted, strict=True):
            assert abs(count - index * weight / sum(weights)) <= blend.error + 1e-9
        source, number = blend.source_at(index)
        assert number == counted[source]
        counted[source] += 1
    far = 10**14
    assert sum(blend.counts(far)) == far
    assert blend.counts(far + 1)[blend.source_at(far)[0]] == blend.source_at(far)[1] + 1
