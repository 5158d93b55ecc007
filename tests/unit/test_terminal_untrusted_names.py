"""What others name reaches neither the terminal nor a file as it stands: escapes, half characters, links, devices."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native import lock
from megatron_ext.config.parse.arguments import parse
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.resilience.process_end import RunStatus, run_guarded
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
