"""A rank that stops, skips a collective, waits for its data, crashes or leaves is named; the others end in time.

All cases run at once: their ranks wait most of the time.
"""

import json
import re
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.killed_training import last_iteration
from megatron_ext.forkserver.ranks import run_ranks
from tests.support.launched import end_all, rank_processes, start, wait_until
from tests.support.program import run_program, tiny
from tests.support.watched_ranks import PAUSE, WatchedRank, fork_program

TIMEOUT, BETWEEN_HEARTBEATS = 6.0, 0.5  # seconds
FLAGS = tiny("--global-batch-size 6 --log-interval 1")


@dataclass(frozen=True)
class Case:
    """A fault of one rank, and after how many seconds the others give it up."""

    ranks: int
    fault: str
    faulty: int
    minutes: float = TIMEOUT / 60.0
    terminate: bool = False
    steps: int = 100


CASES = {
    "stopped": Case(2, "stop", 1),
    "stopped rank 0": Case(2, "stop", 0),
    "stopped, then SIGTERM": Case(3, "stop", 1, minutes=10.0, terminate=True),
    "loader": Case(2, "sleep_in_loader", 1),
    "loader of a single rank": Case(1, "sleep_in_loader", 0),
    "skipped collective": Case(3, "skip_reduction", 2),
    "exit": Case(3, "leave", 1),
    "crash": Case(2, "crash", 1),
    "paused": Case(2, "pause_all", 1, steps=8),
}


@dataclass(frozen=True)
class Ended:
    """What a case left."""

    ranks: list[WatchedRank]
    save: Path
    record: Mapping[str, Any]
    fault_at: float

    @property
    def codes(self) -> list[int]:
        return [rank.code for rank in self.ranks]

    @property
    def words(self) -> list[str]:
        return [line for rank in self.ranks for line in rank.last_words]

    @property
    def named_at(self) -> float:
        return datetime.fromisoformat(self.record["time"]).timestamp()

    def stacks(self, step: int) -> dict[str, str]:
        return {file.name: file.read_text() for file in (self.save / f"hang-{step}").glob("*.txt")}


def _run(name: str, folder: Path) -> Ended:
    case, save = CASES[name], folder / "save"
    folder.mkdir()
    argv = [*FLAGS, "--train-iters", str(case.steps), "--save", str(save)]
    argv += ["--distributed-timeout-minutes", str(case.minutes)]
    [ranks] = run_ranks(1, fork_program, case.ranks, argv, folder, case.fault, case.faulty, case.terminate)
    record = json.loads((save / "exit.json").read_text()) if (save / "exit.json").exists() else {}
    assert (folder / "fault").exists(), [rank.output for rank in ranks]
    return Ended(ranks, save, record, (folder / "fault").stat().st_mtime)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("hangs")
    with ThreadPoolExecutor(len(CASES)) as pool:
        runs = {name: pool.submit(_run, name, folder / str(n)) for n, name in enumerate(CASES)}
        return {name: run.result() for name, run in runs.items()}


def is_said_once(case: Ended, pattern: str) -> None:
    """One rank says it, and records it."""
    (line,) = case.words
    assert re.search(pattern, line), line
    assert (case.record["code"], case.record["message"]) == (76, line)


def is_in_time(case: Ended) -> None:
    assert TIMEOUT - 1.0 < case.named_at - case.fault_at < TIMEOUT + 2.0
    assert max(rank.ended for rank in case.ranks) - case.named_at < 10.0


REDUCTION = r"(allreduce\S*|_end_coalescing)"
WAITS = rf"waits in {REDUCTION} of the group \S.* \(ranks 0-1\) since \d+\.\d s\. "


@pytest.mark.parametrize(("name", "faulty", "other"), [("stopped", 1, 0), ("stopped rank 0", 0, 1)])
def test_a_stopped_rank_is_named_and_ended(ended: dict[str, Ended], name: str, faulty: int, other: int) -> None:
    case = ended[name]
    is_said_once(
        case,
        rf"^rank {other}: hang at iteration 4: rank {faulty} did not come: it is stopped, by SIGSTOP or a debugger "
        rf"\(process \d+ on .*\), last heard of .*\. Rank {other} {WAITS}Stacks of the ranks that live: .*hang-4\.",
    )
    is_in_time(case)
    assert (case.codes[other], case.codes[faulty]) == (76, -9)
    stacks = case.stacks(4)
    assert list(stacks) == [f"rank-{other}.txt"]
    assert "train_step" in stacks[f"rank-{other}.txt"]
    assert re.search(r"^thread \d+ \(.*\): ", stacks[f"rank-{other}.txt"], re.MULTILINE)


def test_a_stopped_rank_does_not_hold_up_a_sigterm(ended: dict[str, Ended]) -> None:
    case = ended["stopped, then SIGTERM"]
    # Both that live listen and call at about the same time: neither may take the other for silent.
    is_said_once(
        case, r"^rank [02]: hang at iteration 4: rank 1 did not come: it is stopped, [^;]*\. Ranks 0, 2 wait in "
    )
    assert case.codes == [76, -9, 76]
    assert max(rank.ended for rank in case.ranks) - case.fault_at < 0.5 + 10.0


def test_a_hung_loader_is_named(ended: dict[str, Ended]) -> None:
    case = ended["loader"]
    is_said_once(
        case,
        r"^rank [01]: hang at iteration 4: rank 1 waits for its data loader, since \d\.\d s, at iteration 4, in the "
        rf"batch\. Rank 0 {WAITS}",
    )
    is_in_time(case)
    assert case.codes == [76, 76]
    stacks = case.stacks(4)
    assert set(stacks) == {"rank-0.txt", "rank-1.txt"}
    assert "hung_loader" in stacks["rank-1.txt"]


def test_a_single_ranks_hung_loader_is_bounded(ended: dict[str, Ended]) -> None:
    case = ended["loader of a single rank"]
    is_said_once(case, r"^rank 0: hang at iteration 4: rank 0 waits for its data loader, since \d\.\d s")
    is_in_time(case)
    assert case.codes == [76]
    assert "hung_loader" in case.stacks(4)["rank-0.txt"]


def test_who_skips_a_collective_is_named_with_group_and_operation(ended: dict[str, Ended]) -> None:
    case = ended["skipped collective"]
    is_said_once(
        case,
        r": rank 2 did not come to collective \d+ of the group (?P<group>\S.*): it has begun \d+, and waits in "
        rf"allreduce of the group of all ranks, at iteration 4, in the update\. Ranks 0-1 wait in {REDUCTION} of the "
        r"group (?P=group) \(ranks 0-2\) since \d+\.\d s\. ",
    )
    is_in_time(case)
    assert case.codes == [76, 76, 76]


def test_a_pause_of_the_whole_job_is_no_hang(ended: dict[str, Ended]) -> None:
    """Longer than the timeout, but not by the 5 s that gloo's collectives have besides: these it would not survive."""
    case = ended["paused"]
    assert (case.codes, case.words, case.record["code"]) == ([0, 0], [], 0)
    assert min(rank.ended for rank in case.ranks) - case.fault_at > PAUSE > TIMEOUT


@pytest.mark.slow  # the cases above stop ranks; test_restarts.py has the launcher
def test_under_torchrun_a_stopped_rank_holds_up_neither_the_end_nor_the_restart(tmp_path: Path) -> None:
    """torchrun's SIGTERM does nothing to a stopped process, for which it would wait half a minute."""
    save, log = tmp_path / "save", tmp_path / "log"
    flags = [*FLAGS, "--train-iters", "100000", "--save-interval", "5", "--save", str(save), "--load", str(save)]
    flags += ["--distributed-timeout-minutes", str(TIMEOUT / 60.0)]
    process = start(flags, log, ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"])
    try:
        wait_until(lambda: last_iteration(save) >= 6, log, process)
        ranks = rank_processes(process)
        ranks[1].suspend()
        _, left = psutil.wait_procs(list(ranks.values()), timeout=TIMEOUT + 2.0 + 10.0)
        assert not left
        wait_until(lambda: "resuming at iteration" in log.read_text(), log, process)
        resumed_from = last_iteration(save)
        wait_until(lambda: last_iteration(save) >= resumed_from + 2, log, process)
        time.sleep(4 * BETWEEN_HEARTBEATS)  # these steps take less than the time between two heartbeats
        rank_processes(process)[1].send_signal(signal.SIGSEGV)
        assert process.wait(60) == 1
    finally:
        end_all(process)
    first, second = (line for line in log.read_text().splitlines() if line.startswith("rank "))
    assert re.match(r"rank 0: hang at iteration \d+: rank 1 did not come: it is stopped", first), first
    assert re.match(
        r"rank 0: rank 1 was killed by SIGSEGV \(process \d+ on .*\), last heard of at iteration ", second
    ), second
    assert json.loads((save / "exit.json").read_text())["message"] == second
    box = log.read_text().rpartition("Root Cause")[2]
    assert re.search(r"rank +: 1 .*\n +exitcode +: -11 ", box), "torchrun names the same rank"


@pytest.mark.parametrize(
    ("name", "how", "codes"),
    [("exit", "ended with exit code 3", [76, 3, 76]), ("crash", "was killed by SIGSEGV", [76, -11])],
)
def test_the_first_cause_of_a_death_survives(ended: dict[str, Ended], name: str, how: str, codes: list[int]) -> None:
    case = ended[name]
    is_said_once(case, rf"^rank [02]: rank 1 {how} \(process \d+ on .*\), last heard of .*; lost at iteration [45]\. ")
    assert case.codes == codes
    assert max(rank.ended for rank in case.ranks) - case.fault_at < 10.0
    assert ("Fatal Python error: Segmentation fault" in case.ranks[1].output) == (name == "crash")


@pytest.mark.full
@pytest.mark.parametrize("together", [False, True])
def test_a_rank_that_is_lost_in_loading_is_no_damaged_checkpoint(together: bool, tmp_path: Path) -> None:
    """Where ranks read together, the other one meets the closed connection in the middle of it."""
    flags = [*FLAGS, "--train-iters", "2", "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    run_ranks(2, run_program, flags)
    flags += ["--ckpt-fully-parallel-load"] if together else []
    [ranks] = run_ranks(1, fork_program, 2, flags, tmp_path, "die_in_load", 1)
    assert [rank.code for rank in ranks] == [76, -signal.SIGKILL], ranks[0].output
    assert re.search(
        r"^rank 0: rank 1 was killed by SIGKILL .*; lost before the first step\. ", ranks[0].last_words[-1]
    )
