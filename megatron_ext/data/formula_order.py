"""--data-order formula: which tokens a sample holds is computed from its number. No index is built, stored or read.

    source = FormulaSource("data/text", share_of("data/text", (0.0, 0.969)), seq_length=8192, key=b"key")
    source.window(source.number_at(0))      # the 8,193 tokens of the first sample

The documents of a split lie one after another in the .bin. They are cut, in that order, into windows that begin every
seq_length tokens and are seq_length + 1 long, as megatron-core cuts them; each epoch goes through all windows once, in
an order of its own (`permutation`). A blend takes its sources in exact proportion (`mixture`). Memory, the time to
start, and the time to resume are the same for a thousand tokens and for a trillion. Torch-free.

Unlike in megatron-core's order, a window holds documents that are neighbours in the file, and its borders are the same
in every epoch: shuffle the documents before preprocessing, if they are sorted.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_ext.data.integrity import Share, open_index
from megatron_ext.data.mask import BEGINS, COUNTS, Mask
from megatron_ext.data.mixture import Mixture
from megatron_ext.data.permutation import Permutation
from megatron_ext.data.samples import SampleWindow, Source
from megatron_ext.data.stored import open_bin
from megatron_ext.errors import DataError


class FormulaSource:
    """The windows of one split of one pair.

    Args:
        prefix: path without suffix of a checked pair.
        share: the split's part of it.
        seq_length: tokens in a sample, without the label of the last.
        key: the order depends on it, and not on the name or the place of the files.
        mask: which tokens count in the loss; None for all. Of documents that were packed to `seq_length` a window is
            one sequence: the label of its last token belongs to another document, and does not count.
    """

    def __init__(self, prefix: str, share: Share, seq_length: int, key: bytes, mask: Mask | None = None):
        self.prefix = prefix
        self.mask = mask
        self._is_packed = mask is not None and mask.packed_to > 0
        self.windows = (share.tokens - (0 if self._is_packed else 1)) // seq_length
        assert self.windows > 0
        self._seq_length = seq_length
        self._first_token = share.first_token
        self._dtype = open_index(prefix).dtype.newbyteorder("<")
        self._file = open_bin(prefix)
        self._order = lru_cache(maxsize=4)(
            lambda epoch: Permutation(self.windows, hashlib.sha256(key + epoch.to_bytes(8, "little")).digest())
        )

    def number_at(self, index: int) -> int:
        """Return the window of sample `index`, counted through the epochs: epoch x windows + window."""
        epoch, position = divmod(index, self.windows)
        return epoch * self.windows + self._order(epoch)(position)

    def window(self, number: int) -> np.ndarray:
        """Return the tokens of a window: int64 [seq_length + 1].

        Raises:
            DataError: the file has become shorter since it was opened.
        """
        start = self._first(number) * self._dtype.itemsize
        wanted = (self._seq_length + (0 if self._is_packed else 1)) * self._dtype.itemsize
        content = self._file.read(start, wanted)
        if len(content) != wanted:
            raise DataError(f"{self.prefix}.bin ends before byte {start + wanted}: it was truncated during the run")
        return self._whole(np.frombuffer(content, self._dtype).astype(np.int64))

    def flags(self, number: int) -> np.ndarray:
        """Return the flags of the tokens of a window, as `megatron_ext.data.mask` says: int64 [seq_length + 1]."""
        assert self.mask is not None
        count = self._seq_length + (0 if self._is_packed else 1)
        return self._whole(self.mask.read(self._first(number), count).astype(np.int64))

    def _first(self, number: int) -> int:
        return self._first_token + number % self.windows * self._seq_length

    def _whole(self, values: np.ndarray) -> np.ndarray:
        return np.append(values, 0) if self._is_packed else values


class FormulaDataset:
    """Samples of one or several sources, with the fields of megatron-core's GPTDataset, as numpy arrays.

    Args:
        parts: the sources.
        weights: their shares; None for one pass over all, each in proportion to its size, and so in every epoch.
        num_samples: its length, or None for one epoch, which takes `weights` None.
        eod: the token that ends a document, which --eod-mask-loss leaves out of the loss; None to leave none out.
    """

    def __init__(
        self, parts: Sequence[FormulaSource], weights: Sequence[float] | None, num_samples: int | None, eod: int | None
    ):
        self._parts = list(parts)
        self._mixture = Mixture(weights or [part.windows for part in parts])
        assert num_samples is not None or weights is None
        self._num_samples = sum(part.windows for part in parts) if num_samples is None else num_samples
        self._eod = eod
        self.sources = [Source(part.prefix, part.windows) for part in parts]
        self.order_depends_on: list[int] = []

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return tokens, labels and position_ids, int64 [seq], and loss_mask, float32 [seq]; with a mask also
        document_begins, bool [seq]."""
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        window = self.window_at(index)
        text = self._parts[window.source].window(window.number)
        tokens = text[:-1]
        sample = {
            "tokens": tokens,
            "labels": text[1:],
            "loss_mask": (np.ones(len(tokens)) if self._eod is None else tokens != self._eod).astype(np.float32),
            "position_ids": np.arange(len(tokens)),
        }
        if self._parts[window.source].mask is None:
            return sample
        flags = self._parts[window.source].flags(window.number)
        return sample | {
            "loss_mask": sample["loss_mask"] * (flags[1:] & COUNTS != 0),
            "document_begins": flags[:-1] & BEGINS != 0,
        }

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source."""
        return self._mixture.counts(samples)

    def window_at(self, index: int) -> SampleWindow:
        """Return where sample `index` lies."""
        source, number = self._mixture.source_at(index)
        return SampleWindow(source, self._parts[source].number_at(number))

    def part(self, source: int) -> "FormulaDataset":
        """Return the samples of one source alone, in the order in which they appear here."""
        return FormulaDataset([self._parts[source]], None, self.counts(len(self))[source], self._eod)
