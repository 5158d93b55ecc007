"""Reads samples that will be needed ahead, many at the same time: a store answers late, but to many at once.

dataset = ReadAhead(dataset)
dataset.will_need([17, 4, 99])      # returns at once
dataset[17]                         # waits for the parts of it that have not come yet
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from megatron_ext.data.samples import SampleDataset
from megatron_ext.data.threads import DaemonThreads

THREADS = 32
"""Samples that are read at the same time."""


STEPS = 4
"""Steps that are read ahead."""


class ReadAhead:
    """A map-style dataset over another one.

    Args:
        dataset: where the samples come from; reading from it is safe in several threads.
        threads: number of samples to read at the same time.
    """

    def __init__(self, dataset: SampleDataset, threads: int = THREADS):
        self._dataset = dataset
        self._threads = DaemonThreads(threads, "read-ahead")
        self._coming: dict[int, Future[Mapping[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def will_need(self, indices: Iterable[int]) -> None:
        """Begin to read these samples, in this order; samples read ahead that are not among them are dropped."""
        wanted = [index for index in indices if index < len(self._dataset)]
        kept = {index: self._coming[index] for index in wanted if index in self._coming}
        for index, future in list(self._coming.items()):
            if index not in kept:
                future.cancel()
        self._coming = kept
        for index in wanted:
            if index not in kept:
                kept[index] = self._threads.submit(lambda index=index: self._dataset[index])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        future = self._coming.get(index)
        # One that was dropped in the meantime is read on the spot.
        return self._dataset[index] if future is None or future.cancelled() else future.result()

    def close(self) -> None:
        """End the threads."""
        self._coming = {}
        self._threads.close()
