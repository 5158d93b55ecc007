"""What the ranks write for each other: the first call and the first end count, and who is absent is left out."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.resilience.rank_reports import Board


@pytest.fixture
def boards() -> list[Board]:
    store = HashStore()
    return [Board(store, rank, 3) for rank in range(3)]


def test_the_first_who_calls_is_the_caller(boards: list[Board]) -> None:
    assert boards[0].caller() is None
    assert boards[2].call(5) == (2, 5)
    assert boards[1].call(6) == (2, 5)
    assert boards[0].caller() == (2, 5)


def test_beats_and_answers_are_of_those_that_wrote(boards: list[Board]) -> None:
    assert boards[0].beats() == {}
    boards[0].publish({"beat": 1})
    boards[2].publish({"beat": 7})
    boards[2].publish({"beat": 8})
    assert boards[1].beats() == {0: {"beat": 1}, 2: {"beat": 8}}
    for board in boards:
        board.answer({"from": board.rank})
    assert boards[1].answers(60.0) == {rank: {"from": rank} for rank in range(3)}


def test_the_first_end_is_the_cause(boards: list[Board]) -> None:
    assert boards[0].first_end() is None
    boards[1].note_end("rank 0 was killed")
    boards[0].note_end("rank 1 ended")
    assert boards[2].first_end() == "rank 0 was killed"


@pytest.mark.parametrize("tell", [lambda board: board.call(5), lambda board: board.note_end("rank 0 was killed")])
def test_a_call_and_an_end_are_news_to_all(boards: list[Board], tell: Callable[[Board], object]) -> None:
    assert not any(board.has_news() for board in boards)
    tell(boards[1])
    assert all(board.has_news() for board in boards)


def test_one_speaks_and_the_verdict_reaches_all(boards: list[Board]) -> None:
    assert [board.speaks_for_all() for board in boards] == [True, False, False]
    assert boards[0].verdict(0.0) is None
    boards[0].judge({"silent": [1]})
    assert boards[2].verdict(0.0) == {"silent": [1]}
    assert all(board.asking_since is None for board in boards)


def test_only_the_ranks_that_are_asked_for_are_read(boards: list[Board]) -> None:
    for board in boards:
        board.publish({"beat": board.rank})
    assert boards[0].beats([2, 1]) == {1: {"beat": 1}, 2: {"beat": 2}}
    assert boards[0].beats([]) == {}, "none is not all"
    assert boards[0].beats() == {rank: {"beat": rank} for rank in range(3)}


def test_answers_and_a_verdict_are_waited_for_as_long_as_one_is_missing(boards: list[Board]) -> None:
    boards[0].answer({"from": 0})
    began = time.monotonic()
    assert boards[0].answers(0.0) == {0: {"from": 0}}
    assert boards[0].verdict(0.0) is None
    assert boards[0].answers(0.12) == {0: {"from": 0}}
    assert time.monotonic() - began >= 0.12

    def come_late() -> None:
        boards[1].answer({"from": 1})
        boards[2].answer({"from": 2})
        boards[1].judge({"silent": []})

    thread = threading.Timer(0.2, come_late)
    thread.start()
    assert sorted(boards[0].answers(60.0)) == [0, 1, 2]
    assert boards[0].verdict(60.0) == {"silent": []}
    assert time.monotonic() - began < 30.0, "as soon as all are there"
    thread.join()


class Silent:
    """A store that fails in each of its methods, and notes since when it was asked."""

    def __init__(self) -> None:
        self.board: Board | None = None
        self.seen: list[float | None] = []

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            assert self.board is not None
            self.seen.append(self.board.asking_since)
            raise RuntimeError("Connection reset by peer")

        return fail


def test_a_board_says_since_when_it_asks_and_that_it_no_longer_does() -> None:
    store: Any = Silent()
    board = store.board = Board(store, 0, 2)
    calls: list[Callable[[], object]] = [
        lambda: board.publish({}),
        board.beats,
        board.has_news,
        lambda: board.call(1),
        board.caller,
        lambda: board.answer({}),
        lambda: board.answers(0.0),
        lambda: board.judge({}),
        lambda: board.verdict(0.0),
        lambda: board.note_end("text"),
        board.first_end,
        board.speaks_for_all,
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Connection reset"):
            call()
        assert store.seen[-1] is not None
        assert store.seen[-1] >= began
        assert board.asking_since is None
    assert len(store.seen) == len(calls)
