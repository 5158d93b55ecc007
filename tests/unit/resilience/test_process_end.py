"""How a process ends: exit codes, the last line, the record. tests/distributed/test_report_of_ranks.py has several."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_ext.checkpoint.native.lock import hold_until_exit
from megatron_ext.errors import (
    ConfigurationError,
    DataError,
    NumericError,
    PeerLostError,
    StoppedBySignal,
    StorageError,
)
from megatron_ext.resilience import exit_record, process_end
from megatron_ext.resilience.process_end import RunStatus, is_lost_peer, run_guarded

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _this_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


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


def test_the_first_cause_stays_until_the_next_start(tmp_path: Path):
    status = RunStatus(rank=0, save=str(tmp_path))
    guarded(DataError("first"), status)
    guarded(NumericError("second"), status)
    assert json.loads((tmp_path / "exit.json").read_text())["message"] == "rank 0: first"
    exit_record.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    exit_record.clear(tmp_path)


def test_what_a_rank_told_its_launcher_is_no_cause_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own, other = (tmp_path / "attempt_0" / rank / "error.json" for rank in "01")
    own.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    exit_record.tell_launcher("rank 0: lost")
    assert own.exists()
    assert not exit_record.wait_for_another(None, 0.0)
    other.parent.mkdir()
    other.touch()
    assert exit_record.wait_for_another(None, 0.0)


def test_configuration_errors_one_per_line_then_a_closing_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The record and torchrun's summary stand alone: nothing is named above them."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    guarded(ConfigurationError(["--a 1: too small", "--b 2: too large"]), RunStatus(rank=0, save=str(tmp_path)))
    alone = "rank 0: --a 1: too small; --b 2: too large"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == alone
    assert json.loads((tmp_path / "exit.json").read_text())["message"] == alone
    assert capfd.readouterr().err == (
        "--a 1: too small\n"
        "--b 2: too large\n"
        "rank 0: 2 problems in the configuration, named above; nothing was started. Change the flags and start again.\n"
    )


def test_an_unexpected_error_has_its_traceback_above_the_last_line(capfd: pytest.CaptureFixture[str]):
    assert guarded(ValueError("bad\nthing"), RunStatus(rank=1, iteration=5)) == 1
    *above, last, end = capfd.readouterr().err.split("\n")
    assert above[0] == "Traceback (most recent call last):"
    assert last.startswith("rank 1: ValueError: bad thing (at iteration 5). An unexpected error")
    assert end == ""


def test_only_rank_0_prints_what_every_rank_finds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    guarded(ConfigurationError("a"), RunStatus(rank=0, save=str(tmp_path)))
    capfd.readouterr()
    never = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("the record is there"))
    monkeypatch.setattr(exit_record, "time", never)
    assert guarded(ConfigurationError("a"), RunStatus(rank=1, save=str(tmp_path))) == 64
    assert capfd.readouterr().err == ""


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


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def test_helpers_of_helpers_end_with_a_rank_that_its_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data loader's own worker holds the launcher's pipes open too. One that has ended by itself is passed over."""
    killed: list[str] = []

    class Process:
        def __init__(self, name: str = "rank"):
            self.name = name

        def children(self, recursive: bool = False) -> list["Process"]:
            below = {"rank": ["loader", "writer"], "loader": ["worker"]}.get(self.name, [])
            own = [Process(name) for name in below]
            return own + [one for each in own for one in each.children(True)] if recursive else own

        def kill(self) -> None:
            if self.name == "loader":
                raise psutil.NoSuchProcess(1)
            killed.append(self.name)

    monkeypatch.setattr(psutil, "Process", Process)
    process_end._end_descendants()
    assert sorted(killed) == ["worker", "writer"]


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
