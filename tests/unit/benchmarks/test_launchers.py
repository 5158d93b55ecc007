"""What the launchers of benchmarks do with processes; tests/distributed/test_endurance.py has trainings."""

import signal
import subprocess
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks import killed_training
from benchmarks.launchers import ForkedRanks, Torchrun, _terminated


def live(ignores: bool) -> None:
    if ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600.0)


def leave(code: int) -> None:
    raise SystemExit(code)


def test_who_does_not_end_by_sigterm_in_time_is_late() -> None:
    processes = [get_context("fork").Process(target=live, args=(ignores,)) for ignores in (False, True)]
    for process in processes:
        process.start()
    time.sleep(0.2)
    try:
        assert _terminated(processes, 1.0) == [-signal.SIGTERM, None]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("codes", "finished", "failed"),
    [((0, None), False, False), ((0, 0), True, False), ((0, 64), False, True), ((None, 9), False, True)],
)
def test_a_training_is_finished_with_all_ranks_at_0_and_failed_with_any_other_end(
    codes: tuple[int | None, ...], finished: bool, failed: bool, tmp_path: Path
) -> None:
    launcher = ForkedRanks([], 2, tmp_path / "folder" / "log")
    for code in codes:
        target, arguments = (live, (False,)) if code is None else (leave, (code,))
        launcher._processes.append(get_context("fork").Process(target=target, args=arguments))
        launcher._processes[-1].start()
        if code is not None:
            launcher._processes[-1].join()
    assert (launcher.finished(), launcher.failed()) == (finished, failed)
    launcher.end()


def test_what_the_last_attempt_said_does_not_count(tmp_path: Path) -> None:
    launcher = ForkedRanks([], 0, tmp_path / "log")
    launcher.log.write_text("checkpoint: starting afresh\n")
    assert launcher.resumed_at() == 0
    launcher.start()
    assert launcher.resumed_at() is None
    with launcher.log.open("a") as log:
        log.write("checkpoint: resuming at iteration 12\ncheckpoint: resuming at iteration 15\n")
    assert launcher.resumed_at() == 12


@pytest.mark.parametrize(("command", "finished", "failed"), [("exit 0", True, False), ("exit 1", False, True)])
def test_torchrun_has_ended_well_at_0_alone(command: str, finished: bool, failed: bool, tmp_path: Path) -> None:
    launcher = Torchrun([], 2, tmp_path / "log")
    assert (launcher.finished(), launcher.failed(), launcher.has_agent) == (False, False, True)
    launcher._agent = subprocess.Popen(["sh", "-c", command])
    launcher._agent.wait()
    assert (launcher.finished(), launcher.failed()) == (finished, failed)
    launcher.log.write_text("what the ranks said")
    with pytest.raises(killed_training.StuckError if failed else killed_training._Finished) as caught:
        killed_training._wait(lambda: False, launcher, until_finished=True)
    assert not failed or str(caught.value) == "the run does not go on:\nwhat the ranks said"
