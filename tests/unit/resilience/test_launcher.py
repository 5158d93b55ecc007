"""What an attempt finds of those before it, under torchrun's names of folders."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.errors import StoppedBySignal
from megatron_ext.resilience import launcher
from megatron_ext.resilience.launcher import watch_launcher
from megatron_ext.resilience.process_end import RunStatus
from tests.support.forked import Forked

Attempt = Callable[..., Path]


def test_a_stop_holds_for_all_later_attempts_of_the_launch(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path / "a", 1)
    assert not launcher.stopped_before()
    launcher.remember_stop(75, "stopped at iteration 7: SIGTERM")
    for restart in (2, 3):
        attempt(tmp_path / "a", restart, local_rank=1)
        with pytest.raises(StoppedBySignal, match=rf"^stopped at iteration 7: SIGTERM \(restart {restart} of this"):
            launcher.stopped_before()
    attempt(tmp_path / "b", 2)  # another launch
    assert not launcher.stopped_before()


def test_a_stop_with_exit_code_0_ends_later_attempts_with_0(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 0)
    launcher.remember_stop(0, "--exit-interval 7")
    attempt(tmp_path, 1)
    assert launcher.stopped_before()


def test_attempts_are_counted_as_numbers(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 9)
    launcher.remember_stop(0, "--exit-interval 7")
    attempt(tmp_path, 10)
    assert launcher.stopped_before()


def test_ranks_that_torchrun_stops_for_a_new_machine_go_on(attempt: Attempt, tmp_path: Path):
    """It sends SIGTERM, so that they save and end with 75, but counts no restart."""
    attempt(tmp_path, 1)
    launcher.remember_request("SIGTERM")
    launcher.remember_stop(75, "stopped")
    assert not launcher.stopped_before()
    assert launcher.requested_before() is None


def test_a_request_that_was_not_fulfilled_reaches_the_next_attempt(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 0)
    launcher.remember_request("the file stop")
    attempt(tmp_path, 1)
    assert not launcher.stopped_before()
    assert launcher.requested_before() == "the file stop"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"attempt": "x"}', '{"attempt": null}', "\xff"])
def test_a_damaged_record_is_none(content: str, attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 1)
    for name in ("stopped.json", "stop_asked.json"):
        (tmp_path / name).write_text(content, encoding="latin-1")
    assert not launcher.stopped_before()
    assert launcher.requested_before() is None


@pytest.mark.parametrize("error_file", [None, "", "error.json"])
def test_without_a_folder_of_the_launch_nothing_is_remembered(
    error_file: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if error_file is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
    launcher.remember_stop(75, "stopped")
    assert not launcher.stopped_before()
    assert list(tmp_path.iterdir()) == []


Begin = Callable[..., Forked]


def launch(variables: dict[str, str], iteration: int | None, save: Path) -> None:
    """A launcher, whose rank works for a while without it."""
    if os.fork() == 0:
        os.environ.update(variables)
        watch_launcher(RunStatus(rank=3, iteration=iteration, save=str(save)))
        print("works")
        time.sleep(2.0)
        print("has done its work")
        os._exit(0)
    time.sleep(600.0)


@pytest.mark.parametrize(
    ("iteration", "where"), [(7, "at iteration 7"), (0, "at iteration 0"), (None, "before the first step")]
)
def test_a_rank_ends_when_its_launcher_is_killed(
    iteration: int | None, where: str, tmp_path: Path, begin: Begin
) -> None:
    """Nobody has collected the launcher yet: its name is still there."""
    launcher = begin(launch, {"TORCHELASTIC_RUN_ID": "none"}, iteration, tmp_path)
    launcher.says("works")
    launcher.send_signal(signal.SIGKILL)
    _, last = launcher.ended()[1].splitlines()
    assert last.startswith(
        f"rank 3: the launcher (torchrun, process {launcher.pid}) is gone {where}, killed without a word to its ranks; "
        "nothing was saved."
    )
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["message"]) == (76, last)


def test_only_ranks_of_torchrun_end_with_who_started_them(tmp_path: Path, begin: Begin) -> None:
    """A process that a user starts from a shell may outlive the shell."""
    launcher = begin(launch, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, 7, tmp_path)
    launcher.says("works")
    launcher.send_signal(signal.SIGKILL)
    assert launcher.ended()[1] == "works\nhas done its work\n"


RANK = """
import time
from megatron_ext.resilience.launcher import watch_launcher
from megatron_ext.resilience.process_end import RunStatus
watch_launcher(RunStatus(rank=0))
print("works", flush=True)
time.sleep(60.0)
"""


def launch_by_a_shell() -> None:
    command = ["sh", "-c", f"{sys.executable} -c '{RANK}'; echo the script goes on"]
    subprocess.run(command, env=os.environ | {"TORCHELASTIC_RUN_ID": "none"}, check=False)


def test_the_launcher_is_the_one_that_runs_python_and_no_shell_between(begin: Begin) -> None:
    launcher = begin(launch_by_a_shell)
    launcher.says("works")
    launcher.send_signal(signal.SIGKILL)
    assert f"the launcher (torchrun, process {launcher.pid}) is gone before the first step" in launcher.ended()[1]
