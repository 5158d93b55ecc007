"""A permutation that is computed, not stored: shuffling in O(1) memory.

    order = Permutation(122_000_000, b"seed 1234, epoch 0")
    order(0), order(1), order(2)      # three of the numbers below 122 million; no other index gives them

A Feistel network over a domain a x b that is at least as large as wanted, with a x b - size < a, and cycle walking: a
result outside of the wanted range goes through the network again. Source: Black and Rogaway, "Ciphers with Arbitrary
Finite Domains" (CT-RSA 2002), the generalized Feistel cipher and the cycle-walking cipher. The round function is keyed
BLAKE2b, the same on every machine.
"""

import hashlib
import math

ROUNDS = 8
"""Luby and Rackoff (1988) need 4 for a pseudorandom permutation of a large domain; small ones profit from more."""


class Permutation:
    """A bijection of the numbers from 0 to `size` - 1.

    Args:
        size: at least 1.
        key: at most 64 bytes; another key is another order.
    """

    def __init__(self, size: int, key: bytes):
        assert size >= 1
        self.size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        self._hash = hashlib.blake2b(key=key, digest_size=8)

    def __call__(self, index: int) -> int:
        """Return where `index`, from 0 to `size` - 1, goes. It takes on average 1 + 1 / sqrt(size) passes through the
        network."""
        assert 0 <= index < self.size
        while True:
            index = self._network(index)
            if index < self.size:
                return index

    def _network(self, index: int) -> int:
        right, left = divmod(index, self._left)
        for number in range(0, ROUNDS, 2):
            left = (left + self._round(number, right)) % self._left
            right = (right + self._round(number + 1, left)) % self._right
        return right * self._left + left

    def _round(self, number: int, value: int) -> int:
        state = self._hash.copy()
        state.update((value << 8 | number).to_bytes(16, "little"))
        return int.from_bytes(state.digest(), "little")
