"""What the watch of a rank decides, by a clock of the test's: what is overdue, who is silent, to blame, and ended."""

import itertools
import math
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.resilience import exit_record, watch
from megatron_ext.resilience.board import Board
from megatron_ext.resilience.pauses import Pauses
from megatron_ext.resilience.peer_processes import ProcessName
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.progress import FORWARD_BACKWARD, UPDATE, Progress, Wait
from megatron_ext.resilience.verdict import RankReport
from megatron_ext.resilience.watch import Watch
from megatron_ext.resilience.watch_words import THE_END

YES_NO = (False, True)
NOW = 1000.0


class End(Exception):
    """Stands for the end of this process."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The last words; what is done after them is done then."""
    words: list[str | None] = []

    def end(text: str | None, code: int, status: RunStatus, *, before_exit: Callable[[], None]) -> NoReturn:
        assert code == 76
        words.append(text)
        before_exit()
        raise End

    clock = SimpleNamespace(monotonic=lambda: NOW, sleep=lambda seconds: None)
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "end_from_thread", end)
    monkeypatch.setattr(exit_record, "tell_launcher", lambda text: words.append(f"launcher: {text}"))
    return words


def made(board: Any = None, **given: Any) -> Any:
    """A watch of rank 1 in its seventh step that waits for 90 s at most; none of its threads runs."""
    found: Any = object.__new__(Watch)
    found.ending, found._closing = threading.Event(), threading.Event()
    found._status = RunStatus(rank=1, save=None, iteration=7)
    found._progress, found._timeout, found._board = Progress(phase="the save"), 90.0, board
    found._names, found._beats, found._ends, found._heard, found._pauses = {}, {}, {}, {}, Pauses()
    found._noticed_at = found._first_end = found._flight_recorder = None
    found._first_step, found._runs_ahead, found._beat = 3, False, 0
    found._process = ProcessName(7, "node1", "boot", 5).as_json()
    found._describe = lambda group: (group, f"the group {group}", (0, 1))
    for name, value in given.items():
        setattr(found, f"_{name}", value)
    return found


def waiting(since: float, operation: str = "allreduce") -> Progress:
    return Progress(phase="the update", waits={0: Wait(operation, "all", 4, NOW - since)})


@pytest.mark.parametrize(
    ("since", "paused", "overdue"), [(89.9, 0.0, False), (90.0, 0.0, True), (95.0, 6.0, False), (96.0, 6.0, True)]
)
def test_a_wait_is_overdue_after_the_timeout_in_which_the_process_ran(
    since: float, paused: float, overdue: bool, said: list[str | None]
) -> None:
    pauses = Pauses()
    pauses.note(NOW - 200.0, NOW - 250.0)  # before the wait began
    pauses.note(NOW - 10.0, NOW - 10.0 - paused)
    assert made(progress=waiting(since), pauses=pauses)._is_overdue() == overdue


def test_what_the_device_does_is_overdue_in_phases_that_follow_it_and_not_in_the_first_step(
    said: list[str | None],
) -> None:
    issued = Wait("allreduce", "all", 4, NOW - 100.0)
    for ahead, first_step, phase in itertools.product(YES_NO, (3, 7), (FORWARD_BACKWARD, UPDATE, "the save")):
        found = made(runs_ahead=ahead, first_step=first_step, progress=Progress(phase=phase, issued=issued))
        assert found._is_overdue() == (ahead and first_step == 3 and phase != "the save")
    assert made(first_step=7, progress=waiting(90.0))._is_overdue(), "the host's own waits count in the first step"


@pytest.mark.parametrize("ended", YES_NO)
@pytest.mark.parametrize("silent", YES_NO)
def test_after_sigterm_or_a_death_a_wait_is_short_where_somebody_is_gone(
    ended: bool, silent: bool, said: list[str | None]
) -> None:
    """Four seconds since the later of the two, the notice and the begin of the wait."""
    for waited, noticed in ((5.0, 3.9), (3.9, 5.0), (4.0, 5.0), (5.0, 4.0)):
        found = made(
            board=object(),
            progress=waiting(waited),
            noticed_at=NOW - noticed,
            first_end="rank 2 was killed" if ended else None,
            silent=lambda board: [2] if silent else [],
        )
        assert found._is_overdue() == (min(waited, noticed) >= 4.0 and (ended or silent))
    assert not made(progress=waiting(50.0), first_end="rank 2 was killed")._is_overdue(), "nobody has noticed"
    assert not made(noticed_at=NOW - 50.0, first_end="rank 2 was killed")._is_overdue(), "it waits for nobody"


def test_who_says_the_same_for_long_is_silent(said: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The eight ranks after this one are listened to, of 12; who has left may say nothing."""
    now = NOW
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now))
    asked: list[list[int]] = []
    beats = {rank: {"beat": 5, "phase": "the update"} for rank in (0, 1, 2, 3, 11)}
    beats[3]["phase"] = THE_END

    def of(ranks: Any) -> dict[int, dict[str, Any]]:
        asked.append(list(ranks))
        return {rank: beats[rank] for rank in ranks if rank in beats}

    board = SimpleNamespace(rank=6, world_size=12, beats=of)
    found = made(patience_with=lambda rank: 4.0 if rank != 0 else math.inf)
    assert found._silent(board) == []
    assert asked == [[7, 8, 9, 10, 11, 0, 1, 2]]
    now += 3.9
    beats[1] = {"beat": 6, "phase": "the update"}
    assert found._silent(board) == []
    now += 0.1
    assert found._silent(board) == [11, 2]
    now += 3.9
    assert sorted(found._silent(board)) == [1, 2, 11]
    small = made(patience_with=lambda rank: 4.0)
    pair = SimpleNamespace(rank=1, world_size=2, beats=lambda ranks: {rank: beats[rank] for rank in ranks})
    small._silent(pair)
    now += 10.0
    assert small._silent(pair) == [0], "not itself"
    beats[0]["phase"] = THE_END
    assert small._silent(pair) == []


def board_of(rank: int, ranks: int = 3, store: Any = None) -> Board:
    return Board(store or HashStore(), rank, ranks)


def answer(report: RankReport, *stopped: int) -> dict[str, Any]:
    return {"report": report.as_json(), "stopped": list(stopped)}


WAITS = RankReport(7, "the update", "allreduce", "all", "the group all", (0, 1, 2), 95.0, {"all": 4})


@pytest.mark.parametrize("is_stopped", YES_NO)
def test_the_caller_names_who_did_not_answer_and_tells_the_others(is_stopped: bool, said: list[str | None]) -> None:
    store: Any = HashStore()
    board = board_of(1, 4, store)
    killed: list[int] = []
    name = ProcessName(99, "node9", "boot", 5)
    board_of(2, 4, store).publish({"beat": 8, "iteration": 6, "phase": "the save", "process": name.as_json()})
    answers = {0: answer(WAITS, *([2] if is_stopped else [])), 1: answer(WAITS)}
    found = made(board, answers=lambda board, seconds: answers, kill=killed.append, ends={3: "was killed by SIGKILL"})
    with pytest.raises(End):
        found._judge(board, 7, None, 2.0)
    how = "is stopped, by SIGSTOP or a debugger" if is_stopped else "does not answer"
    text = (
        f"hang at iteration 7: rank 2 did not come: it {how} (process 99 on node9), last heard of at iteration 6, in "
        "the save; rank 3 did not come: it was killed by SIGKILL. Ranks 0-1 wait in allreduce of the group all (ranks "
        "0-2) since 95.0 s. "
    )
    assert said[0] is not None
    assert said[0].startswith(text)
    assert "(now 1.5)" in said[0], "minutes"
    assert said[1] == f"launcher: rank 1: {said[0]}"
    assert board.verdict(0.0) == {"silent": [2, 3]}
    assert killed == [2, 3]
    assert found.ending.is_set()


def test_all_ranks_answer_a_call_and_end_without_a_word(said: list[str | None]) -> None:
    store: Any = HashStore()
    killed: list[int] = []
    board_of(0, 3, store).judge({"silent": [2]})
    written: list[Any] = []
    found = made(
        board_of(1, 3, store),
        progress=waiting(95.0),
        stopped_here=lambda: [2],
        write_stacks=lambda step, report: written.append((step, report.operation)) or "folder",
        write_flight_record=written.append,
        kill=killed.append,
    )
    with pytest.raises(End):
        found._answer(found._board, (0, 6))
    assert (said, killed) == ([None], [2])
    assert written == [(6, "allreduce"), "folder"], "stacks of the caller's step, then the record"
    given = Board(store, 0, 3)._read({1: "watch/answer/1"})[1]
    assert (given["stopped"], given["report"]["operation"], given["report"]["seconds"]) == ([2], "allreduce", 95.0)


def test_a_caller_that_never_names_the_cause_is_named(said: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_FOR_THE_VERDICT", 0.0)
    found = made(board_of(1), progress=waiting(95.0))
    with pytest.raises(End):
        found._answer(found._board, (0, 6))
    assert said[0] is not None
    assert said[0].startswith(
        "hang at iteration 7: rank 0 called because of a hang, and did not come to name it. This rank waits in "
        "allreduce of the group all since 95.0 s."
    )


@pytest.mark.parametrize(
    ("cause", "first_end", "progress", "text"),
    [
        ("rank 0 does not answer.", None, waiting(95.0), "rank 0 does not answer. This rank waits in allreduce of the"),
        ("rank 0 does not answer.", None, Progress(), "rank 0 does not answer. If it is not stuck"),
        ("rank 0 does not answer.", "rank 2 was killed", waiting(95.0), "rank 2 was killed. This rank waits in"),
        ("", "rank 2 was killed", Progress(), "rank 2 was killed. If it is not stuck"),
        ("", None, waiting(95.0), "the store by which the ranks know of each other is gone. This rank waits in"),
        ("", None, waiting(95.0, "data loader"), "rank 1 waits for its data loader, since 95.0 s, at iteration 7, in"),
    ],
)
def test_who_is_alone_says_what_it_knows(
    cause: str, first_end: str | None, progress: Progress, text: str, said: list[str | None]
) -> None:
    with pytest.raises(End):
        made(progress=progress, first_end=first_end)._end_alone(cause)
    [words] = said
    assert words is not None
    assert words.startswith(f"hang at iteration 7: {text}")


def test_one_that_finds_a_record_says_nothing(said: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_record, "is_there", lambda save: True)
    with pytest.raises(End):
        made(progress=waiting(95.0))._end_alone("rank 0 does not answer.")
    assert said == [None]


def test_ranks_of_a_machine_are_known_once_all_have_said_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store: Any = HashStore()
    added: list[tuple[int, ProcessName]] = []
    found = made(board_of(3, 6, store), processes=SimpleNamespace(add=lambda rank, name: added.append((rank, name))))
    names = {rank: ProcessName(100 + rank, "node1", "boot", 5) for rank in range(6)}

    def publish(rank: int) -> None:
        Board(store, rank, 6).publish({"beat": 1, "iteration": 1, "phase": "x", "process": names[rank].as_json()})

    for rank in (3, 0, 4):
        publish(rank)
        found._introduce(found._board)
        assert (found._names, added) == ({}, [])
    publish(2)
    found._introduce(found._board)
    assert found._names == {2: names[2], 3: names[3]}
    assert sorted(found._beats) == [2, 3]
    assert added == [(2, names[2])], "not itself"
    found._introduce(found._board)
    assert len(added) == 1


def test_the_first_end_is_heard_of_and_noticed(said: list[str | None]) -> None:
    store: Any = HashStore()
    for noticed in (None, 5.0):
        found = made(board_of(1, 3, store), noticed_at=noticed)
        found._hear(found._board)
        assert (found._first_end, found._noticed_at) == (None, noticed)
    Board(store, 2, 3).note_end("rank 0 was killed")
    for noticed in (None, 5.0):
        found = made(board_of(1, 3, store), noticed_at=noticed)
        found._hear(found._board)
        assert (found._first_end, found._noticed_at) == ("rank 0 was killed", noticed or NOW)
    found = made(board_of(1, 3, store), first_end="rank 2 was killed")
    found._hear(found._board)
    assert (found._first_end, found._noticed_at) == ("rank 2 was killed", None)


def test_a_look_tells_where_the_rank_is_and_calls_for_what_is_overdue(said: list[str | None]) -> None:
    store: Any = HashStore()
    called: list[Any] = []
    found = made(
        board_of(1, 2, store), introduce=lambda board: None, answer=lambda board, caller: called.append(caller)
    )
    found._status.iteration, found._first_step = 4, None
    for beat in (1, 2):
        found._look()
        assert Board(store, 0, 2).beats() == {
            1: {"beat": beat, "iteration": 4, "phase": "the save", "process": found._process}
        }
    assert (called, found._first_step) == ([], 4)
    found._status.iteration, found._progress = 5, waiting(90.0)
    found._look()
    assert (called, found._first_step) == ([(1, 5)], 4), "it is the caller, in its step"
    called.clear()
    made_later = made(
        board_of(0, 2, store), introduce=lambda board: None, answer=lambda *given: called.append(given[1])
    )
    made_later._look()
    assert called == [(1, 5)], "the other hears of it"
    alone: list[str] = []
    found = made(None, progress=waiting(90.0), end_alone=alone.append)
    found._look()
    assert alone == [""]


@pytest.mark.parametrize("holder", ["the launcher", "rank 0"])
@pytest.mark.parametrize(
    ("waited", "noticed", "patience", "looks"),
    # The store is asked and says nothing. Looks are a quarter of a second apart while it is asked.
    [(90.0, False, 3.1, 14), (50.0, False, 3.1, None), (50.0, True, 15.0, 61), (3.9, True, 15.0, None)],
)
def test_a_store_that_says_nothing_is_blamed_on_who_holds_it(
    holder: str,
    waited: float,
    noticed: bool,
    patience: float,
    looks: int | None,
    said: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(holder == "the launcher"))
    killed, pauses = [], []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) > 100

    found = made(
        SimpleNamespace(asking_since=5.0),
        progress=waiting(waited),
        noticed_at=NOW - 50.0 if noticed else None,
        closing=SimpleNamespace(wait=wait, is_set=lambda: False),
        kill=killed.append,
    )
    assert found._patience_with_the_board(waited) == patience or waited < 90.0
    if looks is None:
        found._look_after_the_board()
        assert said == []
        return
    with pytest.raises(End):
        found._look_after_the_board()
    text = f"hang at iteration 7: {holder}, which holds the ranks' store, does not answer. This rank waits in allreduce"
    assert said[0] is not None
    assert said[0].startswith(text)
    assert killed == ([] if holder == "the launcher" else [0])
    assert (pauses[0], set(pauses[1:]), len(pauses)) == (0.5, {0.25}, looks)


def test_a_store_that_answers_is_not_blamed_however_often_it_is_asked(said: list[str | None]) -> None:
    asked = itertools.count()

    class Asked:
        @property
        def asking_since(self) -> float:
            return float(next(asked))

    looks = itertools.count()
    closing = SimpleNamespace(wait=lambda seconds: next(looks) > 200, is_set=lambda: False)
    made(Asked(), progress=waiting(500.0), closing=closing)._look_after_the_board()
    for board in (None, SimpleNamespace(asking_since=None)):
        looks = itertools.count()
        made(board, progress=waiting(500.0), closing=closing)._look_after_the_board()
    assert said == []


def test_sigterm_is_noticed_once_and_an_end_is_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a rank: two signals, then it is closed."""
    now = itertools.count(1000)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    store: Any = HashStore()
    found = made(board_of(1, 2, store), until_the_next_look=lambda: 5.0)
    found.terminated_at = None
    signals = iter((b"\0", bytes([signal.SIGTERM]), bytes([signal.SIGTERM])))
    times: list[tuple[float | None, float | None]] = []

    def look() -> None:
        times.append((found.terminated_at, found._noticed_at))
        if len(times) == 3:
            found._closing.set()

    seen: list[Any] = []
    ends = iter(({}, {0: 9}, {}))
    found._processes = SimpleNamespace(ended=lambda seconds: next(ends))
    found._see_end = lambda rank, status: seen.append((rank, status))
    found._wake_up = SimpleNamespace(signals=lambda: next(signals))
    found._look = look
    found._run()
    assert times[0] == (None, None)
    assert times[1] == times[2] != (None, None)
    assert seen == [(0, 9)]
    assert Board(store, 0, 2).beats()[1]["phase"] == THE_END


def test_a_store_that_is_gone_is_no_longer_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(board_of(1, 2), until_the_next_look=lambda: 5.0)
    found.terminated_at = None

    def look() -> None:
        if found._board is None:
            found._closing.set()
        else:
            raise RuntimeError("Connection reset by peer")

    found._processes = SimpleNamespace(ended=lambda seconds: {})
    found._wake_up = SimpleNamespace(signals=lambda: b"")
    found._look = look
    found._run()
    assert found._board is None
