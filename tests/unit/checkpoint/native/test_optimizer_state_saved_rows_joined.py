"""Rows of a weight that several ranks have saved are put together again."""

import torch

from megatron_ext.checkpoint.native.optimizer_state import joined
from megatron_ext.parallel.rows import RowShard


def test_pieces_are_joined_in_the_order_of_their_numbers() -> None:
    pieces = {str(number): torch.full((1, 1, 2), float(number)) for number in (10, 2, 11, 0, 1)}
    whole = joined(RowShard(torch.zeros(5, 2), 0, (5, 2), None), pieces)
    assert whole.tolist() == [[float(number)] * 2 for number in (0, 1, 2, 10, 11)]
