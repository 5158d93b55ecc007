"""A rank that is played in this process: what it hears and sends, its place, and what it leaves behind."""

import os
import pickle
from typing import Any

import pytest
import torch

from benchmarks.rehearsed_world import Objects, played


def test_what_rank_0_tells_is_heard_in_its_order() -> None:
    zero, other = Objects(0), Objects(3, heard=[pickle.dumps(["first"]), pickle.dumps([2])])
    told = ["first"]
    zero.broadcast_object_list(told)
    zero.broadcast_object_list([2])
    assert [pickle.loads(text) for text in zero.told] == [["first"], [2]]
    for expected in (["first"], [2]):
        heard = [None]
        other.broadcast_object_list(heard)
        assert heard == expected
    assert other.told == []


def test_rank_0_gathers_what_each_rank_sent_at_that_time() -> None:
    sent = [[pickle.dumps(f"{rank}.{time}") for time in range(2)] for rank in (1, 2)]
    zero = Objects(0, gathered=sent)
    for time in range(2):
        everyones: list[Any] = [None] * 3
        zero.gather_object(f"0.{time}", everyones)
        assert everyones == [f"0.{time}", f"1.{time}", f"2.{time}"]
    other = Objects(1)
    other.gather_object("mine")
    assert [pickle.loads(text) for text in other.sent] == ["mine"]
    everyones = [None, None]
    other.all_gather_object(everyones, "own")
    assert everyones == ["own", "own"]


@pytest.mark.parametrize(("rank", "world", "local", "of"), [(13, 64, 5, 8), (3, 4, 3, 4), (8, 9, 0, 8)])
def test_a_played_rank_has_its_place_in_a_node_and_leaves_nothing_behind(
    rank: int, world: int, local: int, of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    gather = torch.distributed.gather_object
    with played(rank, world) as objects:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert [int(os.environ[name]) for name in names] == [rank, world, local, of]
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (rank, world)
        torch.distributed.gather_object("sent")
        assert [pickle.loads(text) for text in objects.sent] == ["sent"]
    assert os.environ["RANK"] == "77"
    assert "WORLD_SIZE" not in os.environ
    assert torch.distributed.gather_object is gather
    assert not torch.distributed.is_initialized()
