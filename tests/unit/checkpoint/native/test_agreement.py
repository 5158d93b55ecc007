"""What the first rank finds, all ranks go on with."""

from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import agreement


def test_the_first_rank_alone_makes_what_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system others may see an older folder."""

    def told(answer: list[Any], src: int) -> None:
        assert src == 0
        answer[0] = "of rank 0"

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", told)
    made: list[int] = []
    for rank, calls in ((1, 0), (0, 1)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert agreement.told_by_the_first_rank(lambda: made.append(1) or "own") == "of rank 0"
        assert len(made) == calls
