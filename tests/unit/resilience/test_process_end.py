"""How a process ends: exit codes, the last line, the record. tests/distributed/test_report_of_ranks.py has several."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ext.checkpoint.native.lock import hold_until_exit
from megatron_ext.errors import (
    ConfigurationError,
    DataError,
    NumericError,
    PeerLostError,
    StoppedBefore,
    StoppedBySignal,
    StorageError,
)
from megatron_ext.resilience.process_end import RunStatus, end_from_thread, is_lost_peer, run_guarded
from tests.support.forked import Forked

ROOT = Path(__file__).parents[3]


def guarded(error: BaseException, status: RunStatus) -> int:
    def main() -> int:
        raise error

    return run_guarded(main, status)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("a"), 64),
        (DataError("a"), 65),
        (NumericError("a"), 70),
        (StorageError("a"), 74),
        (StoppedBySignal("a"), 75),
        (PeerLostError("a"), 76),
        (RuntimeError("[pair.cc:545] Read error [::1]:1: Connection reset by peer."), 76),
        (RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] Connect timeout [127.0.0.1]:20891"), 76),
        (RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] Connect timeout [none]"), 76),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"), 76),
        (RuntimeError("a"), 1),
        (KeyboardInterrupt(), 1),
        (type("CheckpointException", (BaseException,), {})("a"), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int, capfd: pytest.CaptureFixture[str]):
    assert guarded(error, RunStatus(rank=0)) == code
    assert capfd.readouterr().err.split("\n")[-2].startswith("rank 0: ")


def test_what_main_returns_and_system_exit_pass_through():
    assert run_guarded(lambda: 0, RunStatus(rank=0)) == 0
    with pytest.raises(SystemExit, match="64"):
        guarded(SystemExit(64), RunStatus(rank=0))


def test_a_typed_error_is_one_line_and_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    status = RunStatus(rank=3, save=str(tmp_path / "new"), iteration=12)
    assert guarded(DataError("x.bin:\n  truncated at byte 7; copy it again"), status) == 65
    message = "rank 3: x.bin: truncated at byte 7; copy it again"
    assert capfd.readouterr().err == message + "\n"
    record = json.loads((tmp_path / "new" / "exit.json").read_text())
    assert record.pop("time").endswith("+00:00")
    assert record == {"code": 65, "rank": 3, "message": message, "iteration": 12}


def test_configuration_errors_one_per_line_then_a_closing_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], attempt: Callable[..., Path]
):
    """The record and torchrun's summary stand alone: nothing is named above them."""
    told, error = attempt(tmp_path, 0), ConfigurationError(["--a 1: too small", "--b 2: too large"])
    guarded(error, RunStatus(rank=0, save=str(tmp_path)))
    alone = "rank 0: --a 1: too small; --b 2: too large"
    assert json.loads(told.read_text())["message"]["message"] == alone
    assert json.loads((tmp_path / "exit.json").read_text())["message"] == alone
    assert capfd.readouterr().err == (
        "--a 1: too small\n"
        "--b 2: too large\n"
        "rank 0: 2 problems in the configuration, named above; nothing was started. Change the flags and start again.\n"
    )
    guarded(ConfigurationError("--a 1: too small"), RunStatus(rank=0, iteration=3))
    assert capfd.readouterr().err == (
        "--a 1: too small\n"
        "rank 0: 1 problem in the configuration, named above; found at iteration 3. Correct it and start again.\n"
    )


def test_a_rank_tells_torchrun_its_own_failure_and_not_that_of_another(
    tmp_path: Path, attempt: Callable[..., Path], capfd: pytest.CaptureFixture[str]
):
    """torchrun would take who lost a peer for the first cause."""
    told = attempt(tmp_path, 0)
    guarded(PeerLostError("a"), RunStatus(rank=0))
    assert not told.exists()
    guarded(DataError("a"), RunStatus(rank=0))
    assert json.loads(told.read_text())["message"]["message"] == "rank 0: a"


def test_an_unexpected_error_has_its_traceback_above_the_last_line(capfd: pytest.CaptureFixture[str]):
    assert guarded(ValueError("bad\nthing"), RunStatus(rank=1, iteration=5)) == 1
    *above, last, end = capfd.readouterr().err.split("\n")
    assert above[0] == "Traceback (most recent call last):"
    assert last.startswith("rank 1: ValueError: bad thing (at iteration 5). An unexpected error")
    assert end == ""


@pytest.mark.parametrize(
    ("error", "others_say"),
    [(ConfigurationError("a"), False), (StoppedBySignal("a"), False), (StoppedBefore("a"), True)],
)
def test_only_rank_0_prints_what_every_rank_finds(
    error: Exception, others_say: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """But each says that an earlier attempt was stopped: the launcher may end rank 0 before it does."""
    code = guarded(error, RunStatus(rank=0, save=str(tmp_path)))
    assert capfd.readouterr().err
    assert guarded(error, RunStatus(rank=1, save=str(tmp_path))) == code
    assert bool(capfd.readouterr().err) == others_say


@pytest.mark.parametrize(("iteration", "where"), [(None, "before the first step"), (0, "at iteration 0")])
def test_an_interrupted_run_says_where_and_how_it_goes_on(
    iteration: int | None, where: str, capfd: pytest.CaptureFixture[str]
):
    guarded(KeyboardInterrupt(), RunStatus(rank=0, iteration=iteration))
    resume = "" if iteration is None else " --load resumes from the last checkpoint."
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"rank 0: interrupted {where}; what was done since the last checkpoint is lost.{resume}"


def test_a_lost_peer_is_silent_where_the_cause_is_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    guarded(NumericError("NaN"), RunStatus(rank=2, save=str(tmp_path)))
    record = (tmp_path / "exit.json").read_text()
    capfd.readouterr()
    assert guarded(PeerLostError("a"), RunStatus(rank=0, save=str(tmp_path))) == 76
    assert capfd.readouterr().err == ""
    assert (tmp_path / "exit.json").read_text() == record


class KnowingWatch:
    """A watch that has seen how another rank ended."""

    def __init__(self, cause: str | None, *, speaks: bool = True):
        self.ending = threading.Event()
        self.closed = False
        self._cause, self._speaks = cause, speaks

    def cause_of_loss(self) -> str | None:
        return self._cause

    def speaks_for_all(self) -> bool:
        return self._speaks

    def close(self) -> None:
        self.closed = True


def lost(watch: Any, save: Path) -> int:
    return guarded(
        RuntimeError("Connection closed by peer"), RunStatus(rank=0, save=str(save), iteration=5, watch=watch)
    )


def test_how_a_peer_ended_is_the_cause(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    watch = KnowingWatch("rank 1 was killed by SIGSEGV (process 7 on node3), last heard of at iteration 4")
    assert lost(watch, tmp_path) == 76
    said = capfd.readouterr().err
    assert said.startswith(
        "rank 0: rank 1 was killed by SIGSEGV (process 7 on node3), last heard of at iteration 4; lost "
    )
    assert "another rank was lost" not in said
    assert json.loads((tmp_path / "exit.json").read_text())["message"] == said.rstrip("\n")
    assert watch.closed


def test_one_of_several_says_how_a_peer_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert lost(KnowingWatch("rank 1 was killed by SIGSEGV", speaks=False), tmp_path) == 76
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "exit.json").exists()


def test_a_watch_that_saw_nothing_leaves_the_report_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert lost(KnowingWatch(None, speaks=False), tmp_path) == 76
    assert capfd.readouterr().err.startswith("rank 0: another rank was lost at iteration 5, without a word why (Conn")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), ConnectionResetError("Connection reset by peer"), ValueError("broken pipe")],
)
def test_errors_of_this_rank_are_not_taken_for_a_lost_peer(error: Exception):
    assert not is_lost_peer(error)


def with_helpers(text: str | None, save: str | None, fails: bool) -> None:
    """A rank with a data loader that has a worker of its own, ended by a thread while it works."""
    for _ in range(2):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(600.0)
            os.wait()
    while len(psutil.Process().children(recursive=True)) < 4:
        time.sleep(0.01)

    def before_exit() -> None:
        print("before the exit")
        if fails:
            raise ValueError

    status = RunStatus(rank=5, save=save, iteration=7)
    threading.Thread(target=lambda: end_from_thread(text, 71, status, before_exit=before_exit)).start()
    time.sleep(600.0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("text", ["why", None])
def test_a_thread_ends_the_process_and_all_that_it_has_started(
    text: str | None, fails: bool, tmp_path: Path, begin: Callable[..., Forked]
) -> None:
    """Each of them holds the launcher's pipe open. The code stays what it is, whatever is done last."""
    code, said = begin(with_helpers, text, str(tmp_path), fails).ended()
    assert code == 71
    assert said.startswith("rank 5: why\nbefore the exit\n" if text else "before the exit\n")
    assert (tmp_path / "exit.json").exists() == (text is not None)
    if text:
        record = json.loads((tmp_path / "exit.json").read_text())
        assert (record["code"], record["message"], record["iteration"]) == (71, "rank 5: why", 7)


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


CHILDREN = """
import multiprocessing, sys, time
from megatron_ext.resilience.process_end import end_process
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    manager = context.Manager()
    context.Process(target=time.sleep, args=(600,)).start()
    print("failing")
    end_process(int(sys.argv[1]))
"""


def test_a_failed_process_ends_with_its_children_and_its_output():
    """The output ends only when every process that holds it is gone: the manager's server and the sleeper too."""
    command = [sys.executable, "-c", CHILDREN, "70"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert (run.returncode, run.stdout) == (70, "failing\n"), run.stderr


def wrong_flags(*words: str) -> None:
    command = [sys.executable, "pretrain_gpt.py", "--num-layers", "none", *words]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 64


def test_wrong_flags_are_recorded_in_the_folder_that_they_name(tmp_path: Path):
    save = tmp_path / "new" / "save"
    wrong_flags("--save", str(save))
    record = json.loads((save / "exit.json").read_text())
    assert (record["code"], record["iteration"]) == (64, None)
    assert "--num-layers: 'none' is not an integer" in record["message"]
    (save / "exit.json").write_text("of an earlier run")
    wrong_flags(f"--save={save}")
    assert json.loads((save / "exit.json").read_text())["code"] == 64


def test_a_dry_run_and_a_folder_in_use_get_no_record(tmp_path: Path):
    wrong_flags("--save", str(tmp_path / "a"), "--dry-run")
    assert not (tmp_path / "a").exists()
    hold_until_exit(tmp_path)
    wrong_flags("--save", str(tmp_path))
    assert not (tmp_path / "exit.json").exists()
