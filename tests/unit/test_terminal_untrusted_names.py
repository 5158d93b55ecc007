"""What others name reaches neither the terminal nor a file as it stands: escapes, half characters, links, devices."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import environment
from megatron_ext.checkpoint.native import lock
from megatron_ext.config.parse.arguments import parse
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.resilience.process_end import RunStatus, run_guarded
from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.terminal import printable

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\x9bb\u202eb", "a\\x9bb\\u202eb"),
        ("a\udcffb", "a\\udcffb"),
        ("line\n\ttab é 漢", "line\n\ttab é 漢"),
        ("\r\x07", "\\r\\x07"),
    ],
)
def test_only_what_is_to_be_read_is_printed(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).encode()


def test_a_name_with_an_escape_is_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigurationError("the file \x1b]0;title\x07 \udcff is missing")

    assert run_guarded(main, RunStatus(rank=0)) == 64
    said = capsys.readouterr().err
    assert "the file \\x1b]0;title\\x07 \\udcff is missing" in said
    assert "\x1b" not in said


def test_a_tool_writes_a_name_out(tmp_path: Path) -> None:
    name = b"no\xff\x1b[2J"
    done = subprocess.run(
        [sys.executable, "tools/inspect_dataset.py", "verify", os.fsdecode(name)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 64
    assert b"no\\udcff\\x1b[2J.idx does not exist" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_key_of_another_programs_file_is_written_out(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4, "x\\u001b[2Jy": 1}')
    done = subprocess.run(
        [sys.executable, "tools/import_config.py", "--from", "deepspeed", str(tmp_path / "ds.json")],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert b"x\\x1b[2Jy" in said
    assert b"\x1b" not in said


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--save", "a\udcff"], "--save: 'a\\udcff' is not UTF-8"),
        (["--save", "a\0b"], "--save: 'a\\x00b' holds a zero byte"),
        (["--save", ""], "--save: the value is empty"),
        (["--load="], "--load: the value is empty"),
        (["--data-path", "a", ""], "--data-path: the value is empty"),
    ],
)
def test_a_text_that_names_no_file_is_refused(argv: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(argv)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "abc"}, "$RANK is 'abc', not an integer from 0"),
        ({"RANK": ""}, "$RANK is '', not an integer from 0"),
        ({"WORLD_SIZE": "0"}, "$WORLD_SIZE is '0', not an integer from 1"),
        ({"WORLD_SIZE": "9" * 5000}, "not an integer from 1"),
        ({"LOCAL_RANK": "-1"}, "$LOCAL_RANK is '-1'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "$RANK is 4, but $WORLD_SIZE is 4: ranks count from 0"),
    ],
)
def test_wrong_variables_of_a_launcher_are_named(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        environment.check_launch(variables)
    assert problem in str(caught.value)
    environment.check_launch({})
    environment.check_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})


_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({**_OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "3 8 1 2 None 29500"),
        (
            {**_OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
            "3 8 3 8 127.0.0.1 29500",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "6000"}, "1 2 None None a 6000"),
        (
            {
                "SLURM_PROCID": "17",
                "SLURM_STEP_NUM_TASKS": "20",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
                "SLURM_NODEID": "2",
                "MASTER_ADDR": "n1",
            },
            "17 20 1 4 n1 29500",
        ),
        ({**_OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"}, "0 2 None None None None"),  # torchrun under mpirun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, "None None None None None None"),  # sbatch
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "None None None None None None"),
    ],
)
def test_ranks_of_mpirun_and_srun_are_no_processes_of_their_own(given: dict[str, str], taken: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = dict(given)
    environment.take_ranks_of_mpi(variables)
    assert " ".join(str(variables.get(name)) for name in names) == taken


def test_ranks_on_several_machines_have_to_know_where_the_first_one_is() -> None:
    variables = dict(_OPEN_MPI)
    environment.take_ranks_of_mpi(variables)
    with pytest.raises(ConfigurationError, match=r"rank 3 of 8, but \$MASTER_ADDR is not set; export MASTER_ADDR="):
        environment.check_launch(variables)
    environment.check_launch({**variables, "MASTER_ADDR": "first"})


def test_the_program_names_a_wrong_rank() -> None:
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--dry-run"],
        cwd=ROOT,
        env={**os.environ, "RANK": "abc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64
    assert "$RANK is 'abc', not an integer from 0" in done.stderr


def test_the_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / lock.LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match=r"its \.lock is a link, which is not followed; remove it"):
        lock.hold_until_exit(tmp_path / "save")
    assert (tmp_path / "mine").read_text() == "precious"


def test_the_lock_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / lock.LOCK)
    with pytest.raises(StorageError, match=r"its \.lock is no file; remove it"):
        lock.hold_until_exit(tmp_path)


class _Full(io.TextIOWrapper):
    def truncate(self, pos: int | None = None) -> int:
        return 0  # a file without content


def test_a_full_disk_at_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own refusal: writing to /dev/full fails as on a disk without room."""
    full = _Full(open("/dev/full", "wb", buffering=0))  # noqa: SIM115 (a lock is held until the process ends)
    monkeypatch.setattr(lock, "_opened", lambda path: full)
    monkeypatch.setattr(lock.fcntl, "lockf", lambda *arguments: None)
    monkeypatch.setattr(json, "dumps", lambda content: " " * 100_000)
    with pytest.raises(StorageError, match=r"\.lock cannot be written: .*[Ss]pace.*another folder"):
        lock.hold_until_exit(tmp_path)
    lock._held.clear()
    lock._open.remove(full)
    full.detach()


def test_a_folder_named_stop_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "stop").mkdir()
    with SignalWatcher(tmp_path / "stop") as watcher:
        assert not watcher.requested
        (tmp_path / "stop").rmdir()
        (tmp_path / "stop").symlink_to(tmp_path / "nowhere")
        assert watcher.requested
    assert not (tmp_path / "stop").is_symlink()
