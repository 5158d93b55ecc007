"""--mock-data: tokens that need no file, are the same on every machine, and can be learned.

Sample i is a function of (seed, split, i) alone. Each token is the one before it plus a small step, mostly the same
one (a Markov chain): a model that learns the step goes from ln(vocabulary) down to `ENTROPY` nats per token, in a few
hundred optimizer steps for a small vocabulary.
"""

import math

import numpy as np

from megatron_ext.data.samples import SampleWindow, Source

_STEPS = np.array([1, 2, 3, 5])
_SHARES = (0.7, 0.1, 0.1, 0.1)
ENTROPY = -sum(share * math.log(share) for share in _SHARES)
"""Entropy in nats per token that no model can go below (0.94), where the vocabulary is larger than the steps."""


class MockDataset:
    """A map-style dataset with the fields of megatron-core's GPTDataset, as numpy arrays.

    Args:
        vocab_size: ids are below it.
        seq_length: tokens in a sample.
        num_samples: its length.
        seed: --seed.
        split: 0 for training, 1 for validation, 2 for test; they share the chain but no sample.
    """

    def __init__(self, *, vocab_size: int, seq_length: int, num_samples: int, seed: int, split: int):
        self._vocab_size = vocab_size
        self._seq_length = seq_length
        self._num_samples = num_samples
        self._key = (seed, split)
        self.sources = [Source("mock", num_samples)]
        self.order_depends_on: list[int] = []

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return tokens, labels and position_ids, int64 [seq], and loss_mask, float32 [seq]."""
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        random = np.random.default_rng((*self._key, index))
        start = random.integers(self._vocab_size)
        steps = random.choice(_STEPS, size=self._seq_length, p=_SHARES)
        text = (start + np.concatenate([[0], np.cumsum(steps)])) % self._vocab_size
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": np.ones(self._seq_length, np.float32),
            "position_ids": np.arange(self._seq_length),
        }

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples: all of the first `samples` samples come from the only source."""
        return [samples]

    def window_at(self, index: int) -> SampleWindow:
        """Return where sample `index` lies."""
        return SampleWindow(0, index)

    def part(self, source: int) -> "MockDataset":
        """Return the dataset itself, which has only one source."""
        return self
