"""Flat ranges of weights: which rows a rank reads of one, and who writes it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.sharding.flat_shards import FlatPart, _spans


def _flat(start: int, end: int) -> FlatPart:
    part: Any = FlatPart.__new__(FlatPart)
    part.core = SimpleNamespace(
        _get_model_param_range_map=lambda weight: {"param": SimpleNamespace(start=start, end=end)}
    )
    return part


@pytest.mark.parametrize(
    ("start", "end", "rows"),
    [
        (5, 18, [(1, 2), (2, 4), (4, 5)]),  # a part of row 1 and of row 4
        (4, 16, [(1, 2), (2, 3), (3, 4)]),
        (5, 7, [(1, 2)]),
        (0, 24, [(0, 1), (1, 5), (5, 6)]),
    ],
)
def test_a_flat_range_reads_the_rows_that_it_touches(start: int, end: int, rows: list[tuple[int, int]]) -> None:
    """The first and the last, which others may have a part of, by themselves; then takes its own elements."""
    weight, part = torch.nn.Parameter(torch.arange(24.0).view(6, 4)), _flat(start, end)
    found = part.rows_to_read(weight)
    assert [(one.first, one.stop) for one in found] == rows
    read = weight.detach()[rows[0][0] : rows[-1][1]]
    assert part.own_of_rows(weight, read).tolist() == list(range(start, end))
    assert part.own(weight, weight.detach()).tolist() == list(range(start, end))
    state = part.to_read(weight, {"exp_avg": torch.zeros(end - start, dtype=torch.bfloat16)})
    assert (state["exp_avg"].shape, state["exp_avg"].dtype) == (read.shape, torch.float32)


def test_a_vector_has_no_rows_that_are_shared() -> None:
    found = _flat(2, 5).rows_to_read(torch.nn.Parameter(torch.zeros(8)))
    assert [(one.first, one.stop) for one in found] == [(2, 5)]


def test_a_weight_is_written_by_who_has_its_beginning() -> None:
    """Weights of 3, 8, 1 and 4 elements in four shards of 4: the third has no beginning."""
    assert _spans([(0, 3), (3, 11), (11, 12), (12, 16)], 4, 4) == [(0, 11), (0, 0), (11, 12), (12, 16)]
