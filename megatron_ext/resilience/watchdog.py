"""Ends a run that hangs, and reports the cause: the rank that did not come, where it is, and the ranks that wait for
it. Also reports how a rank died.

A thread of every rank publishes twice a second on the `Board` where the rank is, and looks for calls. A rank that waits
longer than --distributed-timeout-minutes, in a collective or for its data, calls all ranks. Living ranks write their
stacks into `hang-<step>` in --save and answer; the caller judges by the answers (`hang_diagnosis.py`), prints the cause
and records it. Then all end, and a rank that does not answer is killed by the ranks of its machine: a stopped process
would keep the launcher waiting.

The cause is printed within a second after the timeout if all answer, or if a rank of the same machine sees that a
process is stopped or has ended; within four seconds if no rank sees why a rank is silent, since it may only be slow.

After SIGTERM, and after a rank has died, the wait for a rank that does not answer is short: the launcher kills ranks
that have not ended in half a minute. But a run that is saving must not end because its machine has too much to do: the
wait is longer for a rank that is not seen to be stopped or gone. torch's own timeouts are a little longer than the
watch's, and take over where the watch itself fails.
"""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.durable import only_files
from megatron_ext.errors import PeerLostError
from megatron_ext.resilience import exit_record
from megatron_ext.resilience.hang_diagnosis import (
    RECORD,
    THE_END,
    RankReport,
    hang_text,
    last_words,
    silence_text,
    where,
)
from megatron_ext.resilience.peer_processes import PeerProcesses, ProcessName, exit_text, ranks_of_this_machine
from megatron_ext.resilience.process_end import RunStatus, end_from_thread
from megatron_ext.resilience.progress import FOLLOWS_DEVICE, Pauses, Wait, within, write_stacks
from megatron_ext.resilience.rank_reports import Board
from megatron_ext.resilience.signals import WakeUp

# Seconds.
_BETWEEN_LOOKS, _SHORTEST_PAUSE = 0.5, 0.02
_UNTIL_INTRODUCED = 0.05  # at first, then twice as long from look to look: a thousand ranks ask one store
_FOR_STACKS = 1.0  # the answers come meanwhile
_FOR_ANSWERS = 3.1  # from the call on, of ranks that are not known to be stopped or gone
_BETWEEN_ANSWERS = 0.2
# The store: where its holder is seen to be stopped or gone; where it is not, after the timeout; and before it.
_FOR_A_STOPPED_BOARD, _FOR_A_LATE_BOARD, _FOR_A_SLOW_BOARD = 1.3, 3.1, 15.0
_FOR_THE_VERDICT = 6.0
_FOR_THE_OTHERS = 0.5  # to read the verdict, where this process holds the store
_FOR_THE_LAST_BEAT = 3.0  # without it, an end with exit code 0 looks like a death
# After SIGTERM or a death: how long a rank waits at least, and how long one that is silent has said nothing: one that
# is seen to be stopped or gone, and one of another machine, which may hold Python's lock for seconds and be well.
_AFTER_NOTICE = 4.0
_SILENCE, _SILENCE_FROM_AFAR = 4.0, 15.0
_LISTENS_TO = 8  # the ranks after it: all to all is too much for the store of a thousand ranks

Describe = Callable[[Any], tuple[str, str, tuple[int, ...]]]


class Marks(Protocol):
    """Records collectives in a rank's progress."""

    def start(self) -> None:
        """Begin to record."""
        ...

    def stop(self) -> None:
        """End recording."""
        ...


class Watch:
    """Watches this rank and, with the others, the run, from `start` to `close`.

    Args:
        status: of this rank; its progress is read here.
        timeout: seconds that a rank may wait.
        board: where the ranks meet; None for a single rank.
        describe: returns name, title and ranks of a process group.
        marks: records collectives in the progress, started and stopped with the watch.
        device_runs_ahead: whether collectives return before they are done.
        flight_recorder: returns the dump of NCCL's flight recorder for this rank; None over gloo.
    """

    def __init__(
        self,
        status: RunStatus,
        timeout: float,
        board: Board | None,
        describe: Describe,
        *,
        marks: Marks | None = None,
        device_runs_ahead: bool = False,
        flight_recorder: Callable[[], bytes] | None = None,
    ):
        self.ending = threading.Event()
        """Set once this process is about to be ended by the watch."""
        self.terminated_at: float | None = None
        """When SIGTERM came (time.monotonic()), even while the main thread waits in C++."""
        self._status, self._progress, self._timeout = status, status.progress, timeout
        self._board, self._describe, self._marks, self._runs_ahead = board, describe, marks, device_runs_ahead
        self._flight_recorder = flight_recorder
        self._process = ProcessName.own().as_json()
        self._processes = PeerProcesses()
        self._names: dict[int, ProcessName] = {}
        self._beats: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, str] = {}
        self._heard: dict[int, tuple[int, float]] = {}
        self._first_end: str | None = None
        self._noticed_at: float | None = None
        self._first_step: int | None = None
        self._beat = 0
        self._pauses = Pauses()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="watch", daemon=True),
            threading.Thread(target=self._look_after_the_board, name="watch of the store", daemon=True),
        ]
        self._wake_up = WakeUp()

    def start(self) -> None:
        """Begin to watch. On the main thread, so that SIGTERM is seen while that thread waits in C++."""
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # a rank that crashes leaves its stack in the log
        self._processes.also(self._wake_up.descriptor)
        self._wake_up.start()
        if self._marks is not None:
            self._marks.start()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the watch: this rank leaves, or reports itself why it ends. Calling it again is harmless."""
        if self._closing.is_set() or self.ending.is_set():
            return
        self._closing.set()
        if self._marks is not None:
            self._marks.stop()
        self._wake_up.stop()
        self._wake_up.wake()
        for thread in self._threads:  # whoever comes next finds none of them
            thread.join(_FOR_THE_LAST_BEAT)
        if self._threads[0].is_alive():
            return  # in a store that does not answer; what it uses stays open
        self._processes.close()
        self._wake_up.close()

    def cause_of_loss(self, seconds: float = 3 * _BETWEEN_LOOKS) -> str | None:
        """Return how the first rank to end ended, as soon as it is known; None if no rank reports it in time."""
        deadline = time.monotonic() + seconds
        while self._first_end is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._first_end

    def speaks_for_all(self) -> bool:
        """Return whether this rank is to report why all ranks end; True if the board cannot be asked."""
        with contextlib.suppress(RuntimeError):
            return self._board is None or self._board.speaks_for_all()
        return True

    def _run(self) -> None:
        while not self._closing.is_set():
            pause = self._until_the_next_look()
            due = time.monotonic() + pause
            for rank, status in self._processes.ended(pause).items():
                self._see_end(rank, status)
            self._pauses.note(time.monotonic(), due)
            if signal.SIGTERM in self._wake_up.signals():
                self.terminated_at = self.terminated_at or time.monotonic()
                self._noticed_at = self._noticed_at or time.monotonic()
            if self._closing.is_set():
                break
            try:
                self._look()
            except RuntimeError:  # the store is gone, with rank 0 or with torchrun
                self._board = None
        with contextlib.suppress(RuntimeError):
            if self._board is not None:
                self._board.publish(self._beat_now() | {"phase": THE_END})

    def _until_the_next_look(self) -> float:
        """Return the seconds until the next look: fewer if this rank's wait becomes too long before, or as long as the
        ranks of this machine do not know each other's processes, which they need to see how one ends."""
        wait = self._waits_in()
        if not self._names and self._board is not None:
            return min(_BETWEEN_LOOKS, _UNTIL_INTRODUCED * 2**self._beat)
        left = _BETWEEN_LOOKS if wait is None else self._timeout - self._pauses.time_run(wait.began, time.monotonic())
        return min(_BETWEEN_LOOKS, max(left, _SHORTEST_PAUSE))

    def _look(self) -> None:
        board = self._board
        if self._first_step is None:
            self._first_step = self._status.iteration
        if board is not None:
            board.publish(self._beat_now())
            self._introduce(board)
            if board.has_news():
                self._hear(board)
        if self._is_overdue():
            if board is None:
                self._end_alone("")
            else:
                self._answer(board, board.call(self._step))

    def _hear(self, board: Board) -> None:
        """Note how the first rank ended, and answer a call."""
        if self._first_end is None and (end := board.first_end()) is not None:
            self._first_end, self._noticed_at = end, self._noticed_at or time.monotonic()
        caller = board.caller()
        if caller is not None:
            self._answer(board, caller)

    @property
    def _step(self) -> int:
        return self._status.iteration or 0

    def _beat_now(self) -> dict[str, Any]:
        self._beat += 1
        iteration, phase = self._status.iteration, self._progress.phase
        return {"beat": self._beat, "iteration": iteration, "phase": phase, "process": self._process}

    def _introduce(self, board: Board) -> None:
        """Learn the processes of the ranks of this machine, once all ranks have published theirs."""
        if self._names:
            return
        near = ranks_of_this_machine(board.rank, board.world_size)
        beats = board.beats(near)
        if len(beats) == len(near):
            self._beats = beats
            self._names = {rank: ProcessName.from_json(beat["process"]) for rank, beat in beats.items()}
            for rank, name in self._names.items():
                if rank != board.rank:
                    self._processes.add(rank, name)

    def _see_end(self, rank: int, status: int | None) -> None:
        """Note how the process of a rank ended; not where it had left the run, or had lost another itself."""
        with contextlib.suppress(RuntimeError):
            if self._board is not None:
                self._beats |= self._board.beats([rank])
        name, beat = self._names[rank], self._beats[rank]
        self._ends[rank] = f"{exit_text(status)} (process {name.pid} on {name.host}), last heard of {where(beat)}"
        lost_another = status is not None and os.waitstatus_to_exitcode(status) == PeerLostError.exit_code
        if beat.get("phase") == THE_END or lost_another or self._closing.is_set():
            return
        text = f"rank {rank} {self._ends[rank]}"
        self._noticed_at = self._noticed_at or time.monotonic()
        if self._board is not None:
            with contextlib.suppress(RuntimeError):
                self._board.note_end(text)
                self._first_end = self._board.first_end()
        self._first_end = self._first_end or text

    def _waits_in(self) -> Wait | None:
        return self._progress.longest() or self._device_waits_in()

    def _device_waits_in(self) -> Wait | None:
        return self._progress.issued if self._runs_ahead and self._progress.phase in FOLLOWS_DEVICE else None

    def _is_overdue(self) -> bool:
        wait, now = self._progress.longest(), time.monotonic()
        if wait is None and self._status.iteration != self._first_step:
            wait = self._device_waits_in()  # not in the first step: kernels are compiled; torch's own timeout holds
        if wait is None:
            return False
        if self._pauses.time_run(wait.began, now) >= self._timeout:
            return True
        if self._noticed_at is None:
            return False
        silent = self._silent(self._board) if self._board is not None else []
        if now - max(wait.began, self._noticed_at) < _AFTER_NOTICE:
            return False
        return self._first_end is not None or bool(silent)

    def _silent(self, board: Board) -> list[int]:
        """Return the ranks that have not left and are silent for a while. Call it repeatedly: it does not wait."""
        now = time.monotonic()
        after = [(board.rank + distance) % board.world_size for distance in range(1, _LISTENS_TO + 1)]
        for rank, beat in board.beats(dict.fromkeys(after)).items():
            if rank not in self._heard or self._heard[rank][0] != beat["beat"] or beat["phase"] == THE_END:
                self._heard[rank] = beat["beat"], now
        return [
            rank
            for rank, (_, since) in self._heard.items()
            if rank != board.rank and now - since >= self._patience_with(rank)
        ]

    def _patience_with(self, rank: int) -> float:
        """Return for how many seconds a rank may be silent; a process of this machine that runs is only slow."""
        name = self._names.get(rank)
        if name is None or not name.is_here:
            return _SILENCE_FROM_AFAR
        return _SILENCE if name.does_not_run else math.inf

    def _answer(self, board: Board, caller: tuple[int, int]) -> None:
        """Answer a call, take part in the judgment of the hang, and end."""
        self.ending.set()
        called_at = time.monotonic()
        rank, step = caller
        own, record = self._report(), self._flight_record()
        board.answer({"report": own.as_json(), "stopped": self._stopped_here()})
        folder = self._write_stacks(step, own, record)
        if rank == board.rank:
            self._judge(board, step, folder, max(0.1, called_at + _FOR_ANSWERS - time.monotonic()))
        try:
            verdict = board.verdict(_FOR_THE_VERDICT)
        except RuntimeError:  # the one who judged has ended, and its store with it
            verdict = None
        if verdict is None:
            self._end_alone(f"rank {rank} called because of a hang, and did not come to name it.")
        for silent in (verdict or {}).get("silent", ()):
            self._kill(silent)
        self._end(None)

    def _judge(self, board: Board, step: int, folder: str | None, seconds: float) -> None:
        """Name the cause, from the answers that come within so many seconds, and end."""
        answers = self._answers(board, seconds)
        reports = {rank: RankReport.from_json(answer["report"]) for rank, answer in answers.items()}
        stopped = {rank for answer in answers.values() for rank in answer["stopped"]}
        beats = board.beats()
        silent = {
            rank: silence_text(beats.get(rank, {}), self._ends.get(rank), stopped=rank in stopped)
            for rank in range(board.world_size)
            if rank not in reports
        }
        text = self._said(step, hang_text(reports, silent), folder)

        def tell_the_others() -> None:
            exit_record.tell_launcher(f"rank {self._status.rank}: {text}")
            with contextlib.suppress(RuntimeError):
                board.judge({"silent": sorted(silent)})
            for rank in silent:
                self._kill(rank)
            time.sleep(_FOR_THE_OTHERS)

        self._end(text, tell_the_others)

    def _answers(self, board: Board, seconds: float) -> dict[int, dict[str, Any]]:
        """Return the reports of the ranks that answer within so many seconds; known silent ranks cause no wait."""
        deadline = time.monotonic() + seconds
        while True:
            answers = board.answers(_BETWEEN_ANSWERS)
            missing = [rank for rank in range(board.world_size) if rank not in answers]
            if time.monotonic() >= deadline or not any(self._may_answer(rank, answers) for rank in missing):
                return answers

    def _may_answer(self, rank: int, answers: Mapping[int, Mapping[str, Any]]) -> bool:
        """Return whether a rank that has not answered yet is not known to be stopped, to have ended or to have left."""
        stopped = any(rank in answer["stopped"] for answer in answers.values())
        return not stopped and rank not in self._ends and self._beats.get(rank, {}).get("phase") != THE_END

    def _said(self, step: int, cause: str, folder: str | None) -> str:
        return last_words(step, cause, folder, timeout=self._timeout, recorded=self._flight_recorder is not None)

    def _report(self) -> RankReport:
        wait, counts = self._waits_in(), dict(self._progress.counts)
        report = RankReport(iteration=self._status.iteration, phase=self._progress.phase, counts=counts)
        if wait is None:
            return report
        name, title, members = ("", "", ()) if wait.group is None else self._describe(wait.group)
        return RankReport(
            iteration=report.iteration,
            phase=report.phase,
            operation=wait.operation,
            group=name,
            group_title=title,
            members=members,
            seconds=time.monotonic() - wait.began,
            counts={**counts, **({name: wait.number} if name else {})},
        )

    def _write_stacks(self, step: int, report: RankReport, record: bytes | None) -> str | None:
        """Write this rank's stacks and the dump of NCCL's flight recorder; return the folder if that went well."""
        if self._status.save is None:
            return None
        waits = f", waits in {report.operation} {report.group_title}".rstrip() if report.operation else ""
        folder, rank = Path(self._status.save) / f"hang-{step}", self._status.rank

        def write() -> None:
            write_stacks(folder, rank, f"{report.whereabouts}{waits}")
            if record is not None:
                with open(folder / f"{RECORD}{rank}", "wb", opener=only_files) as file:
                    file.write(record)

        return str(folder) if within(_FOR_STACKS, write) else None

    def _flight_record(self) -> bytes | None:
        """Return the dump of NCCL's flight recorder, which may ask the device; None if the device does not answer.

        It is read before this rank answers a call: the first rank to leave ends the operations in which others wait.
        """
        recorder = self._flight_recorder
        if recorder is None:
            return None
        taken: list[bytes] = []
        within(_FOR_STACKS, lambda: taken.append(recorder()))
        return taken[0] if taken else None

    def _stopped_here(self) -> list[int]:
        """Return the ranks of this machine that are stopped."""
        return [rank for rank, name in self._names.items() if name.is_here and name.state() in ("T", "t")]

    def _kill(self, rank: int) -> None:
        if rank in self._names and rank != self._status.rank:
            self._names[rank].kill()

    def _look_after_the_board(self) -> None:
        """End this rank if it waits too long and the store does not answer either: then the process that serves the
        store is the cause.

        The store's silence is counted in looks of this thread: a pause of this whole process does not count as silence.
        """
        asked, silent, pause = None, 0.0, _BETWEEN_LOOKS
        while not self._closing.wait(pause):
            board, wait = self._board, self._waits_in()
            asking = board.asking_since if board is not None else None
            silent = silent + pause if asking is not None and asking == asked else 0.0
            asked, pause = asking, _BETWEEN_LOOKS if asking is None else _BETWEEN_LOOKS / 2
            if wait is None or asking is None or self._closing.is_set():
                continue
            waited = self._pauses.time_run(wait.began, time.monotonic())
            enough = self._timeout if self._noticed_at is None else min(self._timeout, _AFTER_NOTICE)
            if waited >= enough and silent >= self._patience_with_the_board(waited):
                if _the_launcher_holds_the_store():
                    self._end_alone("the launcher, which holds the ranks' store, does not answer.")
                self._kill(0)
                self._end_alone("rank 0, which holds the ranks' store, does not answer.")

    def _patience_with_the_board(self, waited: float) -> float:
        """Return for how many seconds the store may be silent; its holder may have no processor for some."""
        holder = None if _the_launcher_holds_the_store() else self._names.get(0)
        if holder is not None and holder.is_here and holder.does_not_run:
            return _FOR_A_STOPPED_BOARD
        return _FOR_A_LATE_BOARD if waited >= self._timeout else _FOR_A_SLOW_BOARD

    def _end_alone(self, cause: str) -> None:
        """End without having heard the others; `cause` is a sentence, or empty where this rank alone is the cause."""
        report = self._report()
        folder = self._write_stacks(self._step, report, self._flight_record())
        if self._first_end is not None:
            cause = f"{self._first_end}."
        elif report.waits_for_ranks and not cause:
            cause = "the store by which the ranks know of each other is gone."
        if report.waits_for_ranks:
            cause += f" This rank waits in {report.operation} of {report.group_title} since {report.seconds:.1f} s."
        if exit_record.is_there(self._status.save):
            self._end(None)  # another one was first
        text = self._said(self._step, cause or hang_text({self._status.rank: report}, {}), folder)
        self._end(text)

    def _end(self, text: str | None, before: Callable[[], None] = lambda: None) -> None:
        self.ending.set()
        end_from_thread(text, PeerLostError.exit_code, self._status, before_exit=before)


def _the_launcher_holds_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
