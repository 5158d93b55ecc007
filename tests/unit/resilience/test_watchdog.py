"""A run that is well goes on, however slow its machine is; the first word of what is not well ends it.

Rank 1 and its watch are a process of their own here; what the other ranks do and say is played there.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.resilience import exit_record, watchdog
from megatron_ext.resilience.hang_diagnosis import THE_END
from megatron_ext.resilience.peer_processes import ProcessName
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.progress import EVALUATION, FORWARD_BACKWARD, LOADER, UPDATE, Wait
from megatron_ext.resilience.rank_reports import Board
from megatron_ext.resilience.watchdog import Watch
from tests.support.forked import Forked

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: pidfd and /proc")
Begin = Callable[..., Forked]


class Store:
    """A store that answers late, or is gone."""

    def __init__(self) -> None:
        self._store, self.seconds, self.is_gone = HashStore(), 0.0, False

    def __getattr__(self, name: str) -> Any:
        time.sleep(self.seconds)
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        return getattr(self._store, name)


class Rank1:
    """Rank 1 in its third step, with the board of its run."""

    def __init__(self, ranks: int = 2, save: Path | None = None, timeout: float = 600.0, **given: Any):
        self.store: Any = Store()
        self.status = RunStatus(rank=1, iteration=3, save=None if save is None else str(save))
        self.progress = self.status.progress
        self.progress.phase = "the save"
        board = Board(self.store, 1, ranks)
        self.watch = Watch(self.status, timeout, board, lambda group: (group, f"the group {group}", (0, 1)), **given)

    def board(self, rank: int) -> Board:
        return Board(self.store, rank, 2)

    def says(self, rank: int, name: ProcessName, phase: str = "the save", beat: int = 1) -> None:
        """Another rank has a heartbeat."""
        self.board(rank).publish({"beat": beat, "iteration": 3, "phase": phase, "process": name.as_json()})

    def waits(self, operation: str = "allreduce", group: str | None = "all", since: float = 10.0) -> None:
        self.progress.waits[0] = Wait(operation, group, 1, time.monotonic() - since)

    def runs(self, seconds: float = 60.0) -> None:
        self.watch.start()
        print("watched")
        time.sleep(seconds)
        self.watch.close()


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def name_of(process: subprocess.Popen[bytes]) -> ProcessName:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return dataclasses.replace(ProcessName.own(), pid=process.pid, start_time=int(fields[19]))


@pytest.fixture
def rank_0() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def is_impatient(seconds: float, **other: float) -> None:
    """In the process of the rank, so that it is no other's."""
    for name in ("_AFTER_NOTICE", "_SILENCE", "_SILENCE_FROM_AFAR", "_FOR_ANSWERS"):
        setattr(watchdog, name, other.get(name, seconds))


# One rank alone, and one whose store is gone.


def waits_alone(operation: str, group: str | None, since: float, timeout: float, save: Path) -> None:
    rank = Rank1(save=save, timeout=timeout, flight_recorder=lambda: b"what NCCL recorded")
    rank.waits(operation, group, since)
    rank.store.is_gone = True
    rank.runs(1.0 if since < timeout else 60.0)


@pytest.mark.parametrize(
    ("operation", "group", "said"),
    [
        (LOADER, None, "rank 1 waits for its data loader, since SECONDS s, at iteration 3, in the save."),
        (
            "allreduce",
            "all",
            "the store by which the ranks know of each other is gone. This rank waits in allreduce of the group all "
            "since SECONDS s.",
        ),
    ],
)
def test_a_wait_that_is_too_long_is_named_with_its_stacks(
    operation: str, group: str | None, said: str, tmp_path: Path, begin: Begin
) -> None:
    code, output = begin(waits_alone, operation, group, 10.0, 9.0, tmp_path).ended()
    line = output.splitlines()[-1]
    assert code == 76
    found = f"{tmp_path}/hang-3. What they exchanged: torchfrtrace {tmp_path}/hang-3. "
    said = re.escape(f"{said} Stacks of the ranks that live: {found}").replace("SECONDS", r"1\d\.\d")
    assert re.match(f"rank 1: hang at iteration 3: {said}", line), line
    assert "raise --distributed-timeout-minutes (now 0.15)" in line
    assert json.loads((tmp_path / "exit.json").read_text())["message"] == line
    assert "in waits_alone" in (tmp_path / "hang-3" / "rank-1.txt").read_text()
    assert (tmp_path / "hang-3" / "nccl_trace_rank_1").read_bytes() == b"what NCCL recorded"


def test_a_wait_within_the_timeout_is_none_too_long(tmp_path: Path, begin: Begin) -> None:
    assert begin(waits_alone, LOADER, None, 10.0, 12.0, tmp_path).ended() == (0, "watched\n")


def test_who_finds_the_cause_recorded_says_nothing(tmp_path: Path, begin: Begin) -> None:
    exit_record.write(tmp_path, code=70, rank=0, message="why", iteration=3)
    assert begin(waits_alone, LOADER, None, 10.0, 9.0, tmp_path).ended() == (76, "watched\n")


def device_is_in_a_collective(runs_ahead: bool, phase: str, goes_on: bool, seconds: float) -> None:
    is_impatient(0.2)
    rank = Rank1(timeout=5.0, device_runs_ahead=runs_ahead)
    rank.progress.begin_batch(phase)
    rank.watch.start()
    until(lambda: rank.board(0).beats())  # in its first step
    rank.progress.issued = Wait("allreduce", "all", 1, time.monotonic() - 60.0)
    time.sleep(0.7)
    print("the first step is over")
    rank.status.iteration = 4
    if goes_on:
        rank.progress.begin_microbatch()
    time.sleep(seconds)
    rank.watch.close()


@pytest.mark.parametrize(
    ("runs_ahead", "phase", "goes_on", "code"),
    [
        (True, FORWARD_BACKWARD, False, 76),
        (True, UPDATE, False, 76),
        (True, EVALUATION, False, 76),
        (True, "the save", False, 0),
        (False, UPDATE, False, 0),
        (True, FORWARD_BACKWARD, True, 0),
    ],
)
def test_what_the_device_is_in_is_a_hang_only_while_the_host_follows_it_and_does_not_go_on(
    runs_ahead: bool, phase: str, goes_on: bool, code: int, begin: Begin
) -> None:
    """As on a GPU, whose collectives return before they are done; in the first step kernels are compiled."""
    ended, said = begin(device_is_in_a_collective, runs_ahead, phase, goes_on, 60.0 if code else 1.2).ended()
    assert ended == code
    assert said.startswith("the first step is over\n")


# Calls.


def is_called(save: Path, names_the_cause: bool) -> None:
    rank = Rank1(save=save)
    rank.waits()
    watchdog._FOR_THE_VERDICT = 60.0 if names_the_cause else 0.2
    rank.board(0).call(6)
    rank.watch.start()
    until(lambda: rank.board(0).answers(0.0))
    answer = rank.board(0).answers(0.0)[1]["report"]
    print(answer["operation"], answer["group"], round(answer["seconds"]))
    if names_the_cause:
        rank.board(0).judge({"silent": []})
    time.sleep(60.0)


def test_who_is_called_answers_writes_its_stacks_and_ends_without_a_word(tmp_path: Path, begin: Begin) -> None:
    assert begin(is_called, tmp_path, True).ended() == (76, "allreduce all 10\n")
    assert "waits in allreduce the group all" in (tmp_path / "hang-6" / "rank-1.txt").read_text()
    assert not (tmp_path / "exit.json").exists()


def test_a_caller_that_never_names_the_cause_is_named(tmp_path: Path, begin: Begin) -> None:
    code, said = begin(is_called, tmp_path, False).ended()
    assert code == 76
    assert (
        "rank 1: hang at iteration 3: rank 0 called because of a hang, and did not come to name it. This rank waits in "
        "allreduce of the group all since 10."
    ) in said


def calls(rank_0: ProcessName) -> None:
    """The others are rank 0, which is stopped, and rank 2, which has left."""
    is_impatient(2.0)
    rank = Rank1(ranks=3, timeout=5.0)
    rank.says(0, rank_0)
    rank.says(2, dataclasses.replace(ProcessName.own(), machine="another"), THE_END)
    rank.waits()
    rank.runs()


def test_the_caller_names_who_does_not_answer_and_ends_it(rank_0: subprocess.Popen[bytes], begin: Begin) -> None:
    rank_0.send_signal(signal.SIGSTOP)
    code, said = begin(calls, name_of(rank_0)).ended()
    assert code == 76
    assert "rank 1: hang at iteration 3: rank 0 did not come: it is stopped, by SIGSTOP or a debugger (process " in said
    assert "; rank 2 did not come: it has left the run. Rank 1 waits in allreduce of the group all" in said
    assert rank_0.wait(60.0) == -signal.SIGKILL


# After SIGTERM or a death.


def is_terminated(name: ProcessName, afar: float, store_seconds: float = 0.0) -> None:
    """Rank 0 has said one word, and rank 1 waits for it."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    if afar:
        is_impatient(0.2, _SILENCE_FROM_AFAR=afar)
    rank = Rank1()
    rank.says(0, name)
    rank.waits()
    rank.watch.start()
    until(lambda: rank.board(0).beats().get(1, {}).get("beat", 0) > 1)  # it knows rank 0
    rank.store.seconds = store_seconds
    os.kill(os.getpid(), signal.SIGTERM)
    print("terminated")
    while True:
        time.sleep(0.1)
        if Path(f"/proc/{name.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" and store_seconds:
            rank.store.seconds = 60.0


@pytest.mark.full
def test_a_slow_store_after_sigterm_is_not_a_dead_one(rank_0: subprocess.Popen[bytes], begin: Begin) -> None:
    """On a machine with too much to do, where rank 0 saves and the others wait."""
    rank = begin(is_terminated, name_of(rank_0), 0.0, 4.0)
    rank.says("terminated")
    assert rank.lives_for(3.5), rank.said
    assert rank_0.poll() is None
    rank_0.send_signal(signal.SIGSTOP)
    code, said = rank.ended()
    assert code == 76
    assert "rank 0, which holds the ranks' store, does not answer" in said
    assert rank_0.wait(60.0) == -signal.SIGKILL


@pytest.mark.full
def test_a_rank_of_another_machine_may_say_nothing_for_longer(rank_0: subprocess.Popen[bytes], begin: Begin) -> None:
    assert watchdog._SILENCE_FROM_AFAR >= 15.0
    began = time.monotonic()
    code, said = begin(is_terminated, dataclasses.replace(name_of(rank_0), machine="another one"), 2.5).ended()
    assert code == 76
    assert time.monotonic() - began >= 2.5, said
    assert "rank 0 did not come: it does not answer" in said
    assert rank_0.poll() is None, "that process id is another one's on this machine"


@pytest.mark.full
def test_a_rank_of_this_machine_that_runs_may_say_nothing_for_ever(
    rank_0: subprocess.Popen[bytes], begin: Begin
) -> None:
    """After SIGTERM, where it saves. Once it is stopped, it is given up."""
    rank = begin(is_terminated, name_of(rank_0), 0.2)
    rank.says("terminated")
    assert rank.lives_for(2.0), rank.said
    rank_0.send_signal(signal.SIGSTOP)
    code, said = rank.ended()
    assert code == 76
    assert "rank 0 did not come: it is stopped" in said


def waits_for_the_launchers_store() -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    watchdog._FOR_A_LATE_BOARD = 0.5
    rank = Rank1(timeout=5.0)
    rank.store.seconds = 60.0
    rank.waits()
    rank.runs()


def test_a_store_of_the_launcher_that_says_nothing_is_blamed_on_the_launcher(begin: Begin) -> None:
    code, said = begin(waits_for_the_launchers_store).ended()
    assert code == 76
    assert "hang at iteration 3: the launcher, which holds the ranks' store, does not answer. This rank waits" in said


def sees_two_end() -> None:
    """Rank 2 ends because it has lost rank 0, and may be seen to end before that one."""
    rank = Rank1(ranks=3)
    ranks = {
        code: subprocess.Popen(["sh", "-c", "read _; exit $0", str(code)], stdin=subprocess.PIPE) for code in (3, 76)
    }
    for number, code in ((0, 3), (2, 76)):
        rank.says(number, name_of(ranks[code]), "the update")
    rank.watch.start()
    until(lambda: rank.board(0).beats().get(1, {}).get("beat", 0) > 1)
    for code in (76, 3):
        print(code, rank.watch.cause_of_loss(0.0), rank.board(0).first_end())
        ranks[code].communicate(b"\n")
        time.sleep(0.5)
    cause = rank.watch.cause_of_loss(60.0)
    print(cause, cause == rank.board(0).first_end())
    print("speaks:", rank.watch.speaks_for_all(), rank.watch.speaks_for_all())
    rank.watch.close()


def test_who_ended_because_it_lost_another_is_not_the_first_cause(begin: Begin) -> None:
    """Nor do the others hear of it. One of those that heard of the first cause says it."""
    code, said = begin(sees_two_end).ended()
    assert code == 0, said
    first, second, cause, speaks = said.splitlines()
    assert (first, second, speaks) == ("76 None None", "3 None None", "speaks: True False")
    assert cause.startswith("rank 0 ended with exit code 3 (process ")
    assert cause.endswith(" last heard of at iteration 3, in the update True")


# What a rank tells and hears.


def tells_where_it_is() -> None:
    rank = Rank1()
    seen = rank.board(0).beats
    rank.watch.start()
    until(lambda: seen().get(1, {}).get("beat", 0) > 1)
    rank.status.iteration, rank.progress.phase = 4, "the update"
    until(lambda: (seen()[1]["iteration"], seen()[1]["phase"]) == (4, "the update"))
    assert ProcessName.from_json(seen()[1]["process"]) == ProcessName.own()
    rank.board(0).note_end("rank 0 was killed")
    assert rank.watch.cause_of_loss(60.0) == "rank 0 was killed"
    assert rank.watch.terminated_at is None
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: rank.watch.terminated_at)
    for _ in range(2):
        rank.watch.close()
    assert seen()[1]["phase"] == THE_END


def test_a_rank_says_where_it_is_hears_who_ended_and_leaves_with_a_word(begin: Begin) -> None:
    assert begin(tells_where_it_is).ended() == (0, "")


def test_ranks_of_a_machine_learn_of_each_other_before_their_first_steps() -> None:
    """Who ends before nobody has seen how, and steps of a small model begin at once."""
    rank = Rank1()
    pauses = []
    for _ in range(6):
        pauses.append(rank.watch._until_the_next_look())
        rank.watch._beat_now()
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5], "a thousand ranks ask one store"
