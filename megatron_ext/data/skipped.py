"""--skip-samples leaves samples out of the training, by their places in its order. No other sample moves.

    skipped = skipped_samples(["17", "4096-4159", "run/spike-31/samples.jsonl"])
    17 in skipped, skipped.covers(range(4096, 4100))      # (True, True)

A file holds numbers and ranges, one a line, or lines of JSON with a `sample`. Torch-free.
"""

import bisect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.untrusted.text import load_json, read_file

_LARGEST, _LINES = 1 << 26, 1_000_000
"""Most bytes and lines of a file of samples."""
_MOST = 10**15
_RANGE = re.compile(r"([0-9]{1,16})(?:-([0-9]{1,16}))?")


@dataclass(frozen=True)
class SkippedSamples:
    """Places in the order of the training, as ranges that are in order and apart from each other."""

    ranges: tuple[range, ...] = ()

    def __contains__(self, sample: int) -> bool:
        """Return whether the sample is left out."""
        return bool(self.ranges) and sample in self._at(sample)

    def covers(self, samples: range) -> bool:
        """Return whether all of the samples, which follow each other, are left out."""
        return bool(self.ranges) and samples.start in self._at(samples.start) and samples[-1] in self._at(samples.start)

    def _at(self, sample: int) -> range:
        number = bisect.bisect_right(self.ranges, sample, key=lambda one: one.start) - 1
        return self.ranges[max(number, 0)]


NOTHING = SkippedSamples()


def skipped_samples(words: Sequence[str]) -> SkippedSamples:
    """Return the samples that the words of --skip-samples name.

    Raises:
        ValueError: a word is neither a number, a range, nor a file of them; it names the word, or file and line.
        OSError: a file cannot be read.
    """
    ranges = sorted((one for word in words for one in _named(word)), key=lambda one: one.start)
    merged: list[range] = []
    for one in ranges:
        if merged and one.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, one.stop))
        else:
            merged.append(one)
    return SkippedSamples(tuple(merged))


def _named(word: str) -> Iterable[range]:
    if os.path.exists(word) and not word.isdigit():
        return _of_file(word)
    return [_range(word)]


def _of_file(path: str) -> Iterator[range]:
    content = read_file(path, _LARGEST)
    if content.count(b"\n") > _LINES:
        raise ValueError(f"{path} has more than {_LINES:,} lines; write ranges of samples as 4096-4159")
    for number, line in enumerate(content.split(b"\n"), 1):
        text = line.decode(errors="replace").strip()
        if not text:
            continue
        try:
            if text.startswith("{"):
                row = load_json(line)
                yield _range(str(row.get("sample")))
            else:
                yield _range(text)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None


def _range(text: str) -> range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no sample's number, no range of them as 4096-4159, and no file")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first or last > _MOST:
        raise ValueError(f"{text} is no range of samples; write FIRST-LAST")
    return range(first, last + 1)
