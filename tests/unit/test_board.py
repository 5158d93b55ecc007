"""What the ranks write for each other: the first call and the first end count, and who is absent is left out."""

from collections.abc import Callable

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.resilience.board import Board


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
