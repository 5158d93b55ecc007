"""The protocol of datasets: number of samples, content of a sample, and the source of each sample.

`use_of_sources` counts the samples that a run has read from each source. The counts are a function of the consumed
samples, so that they are exact after any resume.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class SampleDataset(Protocol):
    """A map-style dataset whose samples have tokens, labels, loss_mask and position_ids of [seq].

    With a mask they also have document_begins, bool [seq]: whether a document begins with each of the tokens.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Source:
    """One of the files of a blend, or the synthetic tokens."""

    name: str
    """Prefix of the files, as given."""

    samples_per_epoch: float
    """Number of samples that read each of its tokens once."""


@dataclass(frozen=True)
class SampleWindow:
    """Where a sample lies: the window that begins seq_length x `number` tokens into the epochs of a source."""

    source: int
    number: int


class Samples(SampleDataset, Protocol):
    """The samples of one split. All of it is a function of the position alone, equal on every rank."""

    @property
    def sources(self) -> Sequence[Source]:
        """The sources of the samples, in the order of the blend."""
        ...

    @property
    def order_depends_on(self) -> list[int]:
        """Numbers, other than flags and files, that determine the order of the samples; empty if there are none."""
        ...

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source."""
        ...

    def window_at(self, index: int) -> SampleWindow:
        """Return where sample `index` lies."""
        ...

    def part(self, source: int) -> SampleDataset:
        """Return the samples of one source alone, in the order in which they appear here."""
        ...


def describe_sample(dataset: Samples, index: int) -> str:
    """Return the sample's number and the file that it comes from, for error texts."""
    return f"sample {index} of {dataset.sources[dataset.window_at(index).source].name}.bin"


class BySource:
    """The samples of a held-out dataset, one source after another: a map-style dataset of its own.

    Args:
        dataset: the dataset to take them from.
        counts: number of samples to take of each source; the first ones are taken.
    """

    def __init__(self, dataset: Samples, counts: Sequence[int]):
        self._parts = [dataset.part(source) for source in range(len(counts))]
        self._names = [source.name for source in dataset.sources]
        self._bounds = list(itertools.accumulate(counts, initial=0))

    @property
    def ranges(self) -> list[range]:
        """Positions of each source's samples."""
        return [range(*bounds) for bounds in itertools.pairwise(self._bounds)]

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        source = self._source(index)
        return self._parts[source][index - self._bounds[source]]

    def describe(self, index: int) -> str:
        """Describe sample `index` as `describe_sample` does."""
        source = self._source(index)
        return f"held-out sample {index - self._bounds[source]} of {self._names[source]}.bin"

    def _source(self, index: int) -> int:
        return bisect.bisect_right(self._bounds, index) - 1


def use_of_sources(dataset: Samples, consumed_samples: int, seq_length: int) -> dict[str, dict[str, float]]:
    """Return samples, tokens and epochs that the first `consumed_samples` samples read from each source, by name.

    A prefix that a blend names twice is one source here.

    Returns:
        For each source its samples, its tokens read (samples x seq_length, whether or not they count in the loss), and
        its epochs: how often all of its tokens were read.
    """
    samples: dict[str, int] = {}
    per_epoch = {source.name: source.samples_per_epoch for source in dataset.sources}
    for source, count in zip(dataset.sources, dataset.counts(consumed_samples), strict=True):
        samples[source.name] = samples.get(source.name, 0) + count
    return {
        name: {"samples": count, "tokens": count * seq_length, "epochs": count / per_epoch[name]}
        for name, count in samples.items()
    }
