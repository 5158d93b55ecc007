"""Samples are read ahead once, in order, and dropped where they are not needed any more."""

import threading
from collections.abc import Mapping
from typing import Any

from megatron_ext.data.read_ahead import ReadAhead
from tests.support.counted_samples import Counting


def test_samples_are_read_ahead_once_and_dropped_where_not_needed_any_more() -> None:
    """A sample that was dropped is read on the spot; none behind the end is asked for."""
    gate = threading.Event()

    class Gated(Counting):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            assert gate.wait(20)
            return super().__getitem__(index)

    dataset = Gated(length=10)
    ahead = ReadAhead(dataset, threads=1)
    assert len(ahead) == 10
    ahead.will_need([0, 1, 2, 9, 10, 11])
    coming = dict(ahead._coming)
    assert list(coming) == [0, 1, 2, 9]
    ahead.will_need([2, 3])
    assert ahead._coming[2] is coming[2]
    assert [coming[index].cancelled() for index in (1, 9, 2)] == [True, True, False]
    ahead._coming[1] = coming[1]  # as a loader's thread sees it meanwhile
    gate.set()
    assert [int(ahead[index]["tokens"][0]) for index in (2, 3, 1, 7)] == [2, 3, 1, 7]
    assert sorted(dataset.reads) in ([0, 1, 2, 3, 7], [1, 2, 3, 7])
    ahead.close()
