"""A permutation by formula: every number once, the same order for ever, all orders about as likely."""

from collections import Counter
from collections.abc import Sequence

import pytest

from megatron_ext.data.permutation import Permutation

PINNED, PINNED_LARGE = [720, 781, 924, 58, 462], [69726931, 57063159, 120290890]


@pytest.mark.parametrize("sizes", [range(1, 201), (1000, 1024, 4095, 4097, 9_973)], ids=["small", "large"])
def test_every_number_comes_once(sizes: Sequence[int]):
    for size in sizes:
        order = Permutation(size, b"key")
        assert sorted(map(order, range(size))) == list(range(size)), size


@pytest.mark.parametrize("size", [122_000_000, 2**40 + 1, 10**15])
def test_a_huge_permutation_stays_in_range_without_repeating(size: int):
    order = Permutation(size, b"key")
    numbers = {order(index) for index in [*range(2000), *range(size - 2000, size)]}
    assert len(numbers) == 4000
    assert all(0 <= number < size for number in numbers)
    # As spread as random numbers: the mean of 4,000 is within five standard errors of the middle.
    assert abs(sum(numbers) / 4000 / size - 0.5) < 5 * 12**-0.5 / 4000**0.5


def test_the_order_is_the_same_for_ever():
    """Another one would give every run that goes on samples that it has seen."""
    assert [Permutation(1000, b"seed 1, epoch 0")(index) for index in (0, 1, 2, 500, 999)] == PINNED
    assert [Permutation(122_000_000, b"seed 1, epoch 0")(index) for index in (0, 1, 121_999_999)] == PINNED_LARGE


@pytest.mark.parametrize("root", [1, 2, 3, 10, 31, 11045])
def test_the_domain_is_as_near_to_a_square_as_it_can_be(root: int):
    """The order of every size follows from it, of squares and their neighbours too."""
    for size in (root * root - 1, root * root, root * root + 1):
        if size > 0:
            order = Permutation(size, b"key")
            assert (order._left - 1) ** 2 < size <= order._left**2
            assert order._left * order._right - size in range(order._left)


def test_all_orders_are_about_as_likely():
    orders = Counter(tuple(map(Permutation(4, str(key).encode()), range(4))) for key in range(2400))
    assert len(orders) == 24
    assert all(50 < count < 150 for count in orders.values())  # 100 +- 5 standard deviations
