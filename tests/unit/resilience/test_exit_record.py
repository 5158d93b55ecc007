"""Every way in which a rank ends: its code, its last line, its record and what torchrun is told, against rules that are
written here once more."""

import dataclasses
import itertools
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import errors
from megatron_ext.errors import ConfigurationError, StoppedBefore
from megatron_ext.resilience import deadline, elastic, exit_record, launch, process_end, watch, watch_words
from megatron_ext.resilience.deadline import StopDeadline
from megatron_ext.resilience.pauses import Pauses
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.progress import Progress, Wait
from megatron_ext.resilience.verdict import RankReport, numbers_text
from megatron_ext.resilience.watch import Watch

YES_NO = (False, True)
RESUME = " --load resumes from the last checkpoint."
LOST = RuntimeError("[pair.cc:545] Read error: Connection reset by peer. Some advice")
CODES = {
    "DataError": 65, "NumericError": 70, "MemoryExhaustedError": 71, "StorageError": 74, "StoppedBySignal": 75,
    "StoppedBefore": 75, "PeerLostError": 76,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _this_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _errors() -> list[tuple[BaseException, int, str, str]]:
    """Return errors with the code, what is said above the last line, and that line, with places for where it was and
    how to go on."""
    found: list[tuple[BaseException, int, str, str]] = [
        (getattr(errors, name)(f"of {name}:\n  do this"), code, "", f"of {name}: do this")
        for name, code in CODES.items()
    ]
    for problems in (["--a is wrong"], ["--a is\n wrong", "--b too"]):
        count = "1 problem" if len(problems) == 1 else "2 problems"
        text = f"{count} in the configuration, named above; nothing was started. Change the flags and start again."
        found.append((ConfigurationError(problems), 64, "\n".join(problems) + "\n", text))
    text = "another rank was lost {where}, without a word why ([pair.cc:545] Read error: Connection reset by peer). "
    text += "Look for what ended it (the kernel's log, the scheduler's), and start again.{resume}"
    found.append((LOST, 76, "", text))
    text = "interrupted {where}; what was done since the last checkpoint is lost.{resume}"
    found.append((KeyboardInterrupt(), 1, "traceback", text))
    text = "ValueError: bad thing ({where}). An unexpected error, most likely a fault of the program: report it "
    found.append((ValueError("bad\n thing"), 1, "traceback", text + "with the traceback above.{resume}"))
    return found


def test_every_error_of_ours_has_its_code() -> None:
    defined = {name: kind.exit_code for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert defined == {**CODES, "TrainingError": 1, "ConfigurationError": 64}


@pytest.mark.parametrize("recorded", YES_NO)
@pytest.mark.parametrize(("error", "code", "above", "line"), _errors())
def test_what_a_rank_says_records_and_tells(
    error: BaseException,
    code: int,
    above: str,
    line: str,
    recorded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of rank 0 and another, before the first step and at one, with a record of another rank and without."""
    clock = iter(range(1000))
    monkeypatch.setattr(
        exit_record, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None, time=lambda: 1234.5)
    )

    def fail() -> int:
        raise error

    for number, (rank, iteration, save, torchrun) in enumerate(itertools.product((0, 3), (None, 0, 7), YES_NO, YES_NO)):
        folder, told = tmp_path / str(number), tmp_path / f"launch{number}" / "0" / "error.json"
        told.parent.mkdir(parents=True)
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        if torchrun:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
        if save and recorded:
            exit_record.write(folder, code=1, rank=9, message="the first", iteration=None)
        status = RunStatus(rank=rank, save=str(folder) if save else None, iteration=iteration)
        assert process_end.run_guarded(fail, status) == code
        said = capfd.readouterr().err
        known = save and recorded
        if known and (code == 76 or (code in (64, 75) and rank != 0 and not isinstance(error, StoppedBefore))):
            assert said == ""
            assert not told.exists()
        else:
            where = "before the first step" if iteration is None else f"at iteration {iteration}"
            last = f"rank {rank}: {line.format(where=where, resume=RESUME if iteration is not None else '')}\n"
            if above == "traceback":
                assert said.startswith("Traceback (most recent call last):\n")
                assert said.endswith("\n" + last)
            else:
                assert said == above + last
            message = last[:-1]
            if isinstance(error, ConfigurationError):
                message = f"rank {rank}: " + ("--a is wrong; --b too" if len(error.problems) == 2 else "--a is wrong")
            assert told.exists() == (torchrun and code != 76)
            if torchrun and code != 76:
                assert json.loads(told.read_text()) == {
                    "message": {"message": message, "extraInfo": {"timestamp": "1234"}}
                }
            if save and not recorded:
                record = json.loads((folder / "exit.json").read_text())
                assert record.pop("time").endswith("+00:00")
                assert record == {"code": code, "rank": rank, "message": message, "iteration": iteration}
        if known:
            assert json.loads((folder / "exit.json").read_text())["message"] == "the first"
        assert folder.exists() == save


@pytest.mark.parametrize(("cause", "speaks", "later"), itertools.product((None, "rank 2 was killed"), YES_NO, YES_NO))
def test_who_speaks_of_a_lost_rank(
    cause: str | None, speaks: bool, later: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = iter([False, later])
    monkeypatch.setattr(exit_record, "wait_for_another", lambda save, seconds: next(answers))
    closed: list[bool] = []
    seen: Any = SimpleNamespace(
        ending=SimpleNamespace(is_set=lambda: False),
        cause_of_loss=lambda: cause,
        speaks_for_all=lambda: speaks,
        close=lambda: closed.append(True),
    )

    def fail() -> int:
        raise LOST

    assert process_end.run_guarded(fail, RunStatus(rank=3, iteration=7, watch=seen)) == 76
    said = capfd.readouterr().err
    if later or (cause is not None and not speaks):
        assert said == ""
    elif cause is None:
        assert said.startswith("rank 3: another rank was lost at iteration 7, without a word why")
    else:
        assert said == (
            "rank 3: rank 2 was killed; lost at iteration 7. Look at what that rank wrote, at the kernel's log (out of "
            f"memory) and the scheduler's, and start again.{RESUME}\n"
        )
    assert closed == [True]


class Exited(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("text", "fails"), itertools.product((None, "why"), YES_NO))
def test_a_thread_ends_the_process_when_all_is_said(
    text: str | None, fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Recorded first, then the helpers go, then it is said; the code stays what it is whatever fails."""
    heard: list[Any] = []

    class Timer:
        def __init__(self, *given: Any) -> None:
            self.given = given

        def start(self) -> None:
            heard.append((*self.given, self.daemon))  # pyright: ignore[reportAttributeAccessIssue]

    def leave(code: int) -> None:
        raise Exited(code)

    def before_exit() -> None:
        heard.append("before the exit")
        if fails:
            raise ValueError

    monkeypatch.setattr(process_end.threading, "Timer", Timer)
    monkeypatch.setattr(process_end.os, "_exit", leave)
    monkeypatch.setattr(process_end, "_end_descendants", lambda: heard.append("helpers"))
    monkeypatch.setattr(process_end, "_say", heard.append)
    monkeypatch.setattr(exit_record, "write", lambda save, **record: heard.append((save, record)))
    with pytest.raises(Exited, match=r"^71$"):
        process_end.end_from_thread(
            text, 71, RunStatus(rank=5, save=str(tmp_path), iteration=7), before_exit=before_exit
        )
    record = {"code": 71, "rank": 5, "message": "rank 5: why", "iteration": 7}
    assert heard == [
        (5.0, leave, (71,), True),
        *([(str(tmp_path), record)] if text else []),
        "helpers",
        *(["rank 5: why"] if text else []),
        "before the exit",
    ]


@pytest.mark.parametrize(("for_good", "recorded", "save"), itertools.product(YES_NO, repeat=3))
def test_what_a_stop_that_took_too_long_leaves(
    for_good: bool, recorded: bool, save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []

    def end(text: str | None, code: int, status: RunStatus, *, before_exit: Any) -> None:
        heard.append((text, code, status))
        before_exit()

    monkeypatch.setattr(deadline, "end_from_thread", end)
    monkeypatch.setattr(deadline.launch, "remember_stop", lambda *given: heard.append(given))
    monkeypatch.setattr(exit_record, "wait_for_another", lambda *given: heard.append(given))
    monkeypatch.setattr(exit_record, "is_there", lambda folder: recorded)
    monkeypatch.setattr(exit_record, "tell_launcher", heard.append)
    folder = "/save" if save else None
    for rank, iteration, saved in itertools.product((0, 3), (None, 0, 7), ([], [0], [9, 10])):
        status = RunStatus(rank=rank, save=folder, iteration=iteration)
        signals: Any = SimpleNamespace(for_good=for_good)
        heard.clear()
        StopDeadline(30.0, signals, status, lambda saved=saved: saved)._end(30.0)
        where = "before the first step" if iteration is None else f"at iteration {iteration}"
        text = f"stopped {where}: SIGTERM; --exit-signal-deadline 30 (seconds) is over"
        if not save:
            text += "; nothing saved: no --save"
        elif not saved:
            text += " before a checkpoint was finished; /save holds none. Give it more time"
        else:
            text += (
                f" before this step was saved; the newest checkpoint in /save is that of iteration {saved[-1]}; start "
                "again with --load /save, and give it more time or a smaller --save-interval"
            )
        assert heard == [
            *([(75, text)] if for_good else []),
            *([(folder, 0.4)] if rank else []),
            (None if recorded else text, 75, status),
            *([] if recorded else [f"rank {rank}: {text}"]),
        ]


def test_the_first_of_two_that_saw_the_signal_counts() -> None:
    for by_signals, by_watch in itertools.product((None, 0.0, 5.0, 9.0), (None, 0.0, 4.0, 9.0, "no watch")):
        watched: Any = None if by_watch == "no watch" else SimpleNamespace(terminated_at=by_watch)
        signals: Any = SimpleNamespace(terminated_at=by_signals)
        one = StopDeadline(1.0, signals, RunStatus(rank=0, watch=watched), list)
        times = [time for time in (by_signals, by_watch) if isinstance(time, float)]
        assert one._asked_at() == (sorted(times)[0] if times else None)


def test_a_record_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for save in (None, tmp_path / "file", tmp_path / "file" / "below"):
        exit_record.write(save, code=1, rank=0, message="m", iteration=None)
        assert not exit_record.is_there(save)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_notes_of_earlier_attempts_alone_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By number: attempt 10 is later than 9. A note of one kind is none of the other."""
    for number, (then, now, code) in enumerate(itertools.product((0, 1, 9, 10), (0, 1, 2, 9, 10, 11), (0, 75))):
        folder = tmp_path / str(number)
        (folder / "attempt_x" / "0").mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "attempt_x" / "0" / "error.json"))
        for attempt, remember in ((then, True), (now, False)):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            if remember and code:
                launch.remember_request(f"reason {then}")
            if not remember:
                assert launch.requested_before() == (f"reason {then}" if code and then < now else None)
                assert launch.stopped_before() is False
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(then))
        launch.remember_stop(code, f"message {then}")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(now))
        if code == 75 and then < now:
            with pytest.raises(StoppedBefore) as caught:
                launch.stopped_before()
            assert str(caught.value) == f"message {then} (restart {now} of this launch: nothing was started)"
        else:
            assert launch.stopped_before() == (then < now)
        names = ["stop_asked.json"] if code else []
        assert sorted(path.name for path in folder.iterdir()) == ["attempt_x", *names, "stopped.json"]


def test_how_many_ranks_of_those_launched_work() -> None:
    """Against all numbers of replicas, tried one by one."""
    for tensor, pipeline, context, micro, batch in itertools.product((1, 2), (1, 3), (1, 2), (1, 2), (6, 8, 9, 0)):
        values = {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "context_parallel_size": context,
            "micro_batch_size": micro,
            "global_batch_size": batch,
        }
        model = tensor * pipeline * context
        sizes = [model * replicas for replicas in range(1, 10) if batch and batch % (micro * replicas) == 0]
        for launched in range(1, 30):
            fewer = [size for size in sizes if size <= launched]
            expected = max(fewer) if fewer else 0 if sizes else None
            assert elastic.ranks_to_use(launched, values, lambda size, sizes=sizes: size in sizes) == expected


def test_ranks_are_named_in_ranges() -> None:
    for count in range(1, 6):
        for ranks in itertools.combinations((0, 1, 2, 3, 9, 10, 11), count):
            title, _, listed = numbers_text(ranks[::-1]).partition(" ")
            assert title == ("rank" if count == 1 else "ranks")
            named = []
            for piece in listed.split(", "):
                first, _, last = piece.partition("-")
                assert last != first
                named.append(list(range(int(first), int(last or first) + 1)))
            assert [rank for piece in named for rank in piece] == list(ranks)
            assert all(before[-1] + 1 < after[0] for before, after in itertools.pairwise(named))


def test_a_report_is_the_same_on_the_other_side() -> None:
    report = RankReport(7, "the update", "allreduce", "12", "data parallel", (0, 4), 3.5, {"12": 5, "13": 6})
    assert RankReport.from_json(json.loads(json.dumps(report.as_json()))) == report
    assert dataclasses.astuple(report) == (
        7, "the update", "allreduce", "12", "data parallel", (0, 4), 3.5, {"12": 5, "13": 6}
    )  # fmt: skip


def test_the_last_words_of_a_hang_name_what_there_is() -> None:
    for step, folder, recorded in itertools.product((0, 7), (None, "/save/hang-7"), YES_NO):
        expected = f"hang {'at iteration 7' if step else 'before the first step'}: why. "
        expected += f"Stacks of the ranks that live: {folder}. " if folder else ""
        if folder and recorded:
            expected += f"What they exchanged: tools/doctor.py --flight-recorder {folder}. "
        expected += "If it is not stuck but slow, raise --distributed-timeout-minutes (now 1.5); else look at that "
        expected += f"rank's output and machine, and start again.{RESUME if step else ''}"
        assert watch_words.last_words(step, "why.", folder, timeout=90.0, recorded=recorded) == expected


def test_what_is_known_of_a_silent_rank() -> None:
    process = watch_words.ProcessName.own()
    known = f"(process {process.pid} on {process.host})"
    for left, end, stopped, heard in itertools.product(YES_NO, (None, "was killed"), YES_NO, YES_NO):
        beat: dict[str, Any] = {"iteration": 7, "phase": "the update", "process": process.as_json()} if heard else {}
        if left:
            beat["phase"] = watch_words.THE_END
        how = "is stopped, by SIGSTOP or a debugger" if stopped else "does not answer"
        where = f"{known}, last heard of at iteration 7, in the update"
        expected = f"{how} {where}" if heard else f"{how}, never heard of"
        expected = "has left the run" if left else end or expected
        assert watch_words.silence_text(beat, end, stopped=stopped) == expected


def _watch(**given: Any) -> Any:
    made: Any = object.__new__(Watch)
    made._status = RunStatus(rank=1, save=None, iteration=7)
    made._progress, made._timeout, made._board = Progress(), 90.0, None
    made._names, made._beats, made._ends, made._heard, made._pauses = {}, {}, {}, {}, Pauses()
    made._noticed_at = made._first_end = made._first_step = None
    made._runs_ahead = False
    for name, value in given.items():
        setattr(made, f"_{name}", value)
    return made


def test_who_may_still_answer_and_whom_nobody_waits_for() -> None:
    for stopped, ended, left, known in itertools.product(YES_NO, repeat=4):
        beats = {2: {"phase": watch_words.THE_END if left else "the update"}} if known else {}
        made = _watch(ends={2: "was killed"} if ended else {}, beats=beats)
        answers = {0: {"stopped": []}, 1: {"stopped": [2] if stopped else [22]}}
        assert made._may_answer(2, answers) == (not stopped and not ended and not (known and left))


def test_patience_with_those_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, stands in itertools.product(YES_NO, repeat=2):
        name = SimpleNamespace(is_here=here, does_not_run=stands)
        made = _watch(names={0: name, 2: name})
        expected = 15.0 if not here else 4.0 if stands else math.inf
        assert made._patience_with(2) == expected
        assert made._patience_with(3) == 15.0
        for of_launcher, waited in itertools.product(YES_NO, (89.0, 90.0)):
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(of_launcher))
            slow = 3.1 if waited >= 90.0 else 15.0
            expected = 1.3 if here and stands and not of_launcher else slow
            assert made._patience_with_the_board(waited) == expected


def test_who_is_killed_and_who_is_stopped_here() -> None:
    killed: list[int] = []
    states = {0: "T", 1: "t", 2: "S", 3: "T", 4: None}
    names = {
        rank: SimpleNamespace(
            is_here=rank != 3, state=lambda state=state: state, kill=lambda rank=rank: killed.append(rank)
        )
        for rank, state in states.items()
    }
    made = _watch(names=names)
    assert made._stopped_here() == [0, 1]
    for rank in (0, 1, 2, 9):
        made._kill(rank)
    assert killed == [0, 2], "neither itself nor one that it does not know"


def test_a_report_says_all_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: 112.5))
    made = _watch(describe=lambda group: (f"name of {group}", f"title of {group}", (0, 3)))
    made._progress.phase, made._progress.counts = "the update", {"name of g": 3, "other": 8}
    counts = {"name of g": 3, "other": 8}
    assert made._report() == RankReport(7, "the update", counts=counts)
    made._progress.waits[1] = Wait("data loader", None, 0, 111.0)
    assert made._report() == RankReport(7, "the update", "data loader", seconds=1.5, counts=counts)
    made._progress.waits[2] = Wait("allreduce", "g", 4, 100.0)  # the longer wait
    assert made._report() == RankReport(
        7, "the update", "allreduce", "name of g", "title of g", (0, 3), 12.5, {"name of g": 4, "other": 8}
    )
    assert counts == made._progress.counts, "what it counts is its own"
