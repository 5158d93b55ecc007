"""What run_ranks makes of ranks that answer, fail, die and say nothing."""

import os
import time

import pytest

from megatron_ext.forkserver.ranks import RankError, run_ranks


def answer(kinds: list[str]) -> int:
    rank = int(os.environ["RANK"])
    match kinds[rank]:
        case "fails":
            raise ZeroDivisionError("what it raised")
        case "dies":
            os._exit(11)
        case "says nothing":
            time.sleep(600.0)
    return rank * int(os.environ["WORLD_SIZE"])


def test_results_are_in_the_order_of_the_ranks() -> None:
    assert run_ranks(3, answer, ["well"] * 3) == [0, 3, 6]


def test_each_rank_that_failed_is_told_of_and_who_waits_for_it_is_not_blamed() -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as raised:
        run_ranks(4, answer, ["well", "fails", "dies", "says nothing"])
    assert time.monotonic() - began < 60.0
    found = dict(raised.value.tracebacks)
    assert found.keys() == {1, 2}
    assert found[1].rstrip().endswith("ZeroDivisionError: what it raised")
    assert found[2] == "ended without a result, exit code 11"
    assert "--- rank 1 ---" in str(raised.value)


def test_ranks_that_say_nothing_in_time_are_named() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(3, answer, ["well", "says nothing", "says nothing"], timeout=2.0)
    assert raised.value.tracebacks == [(1, "no result within 2 s"), (2, "no result within 2 s")]
