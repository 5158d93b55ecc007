"""A file is replaced whole or not at all, and is on the disk before it has its name."""

import errno
import os
from pathlib import Path

import pytest

from megatron_ext.durable import replacing


def fail_in_the_middle(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half of the ne")
        raise ValueError("in the middle")


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError, match="in the middle"):
        fail_in_the_middle(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "file", []
    replace = os.replace

    def sync(_descriptor: int) -> None:
        synced.append((tmp_path / ".file.tmp").read_bytes())

    def rename(source: Path, target: Path) -> None:
        assert synced == [b"all of it"]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    with replacing(path) as file:
        file.write(b"all of it")
        assert not path.exists()
    assert path.read_bytes() == b"all of it"


def test_another_name_until_then(tmp_path: Path) -> None:
    with replacing(tmp_path / "file", tmp_path / "mine") as file:
        file.write(b"new")
        assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_opened_is_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match="No space left"), replacing(tmp_path / "file"):
        raise AssertionError("there is no file to write to")


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".file.tmp").symlink_to(outside)
    with replacing(folder / "file") as file:
        file.write(b"new")
    assert (outside.read_text(), (folder / "file").read_text()) == ("kept", "new")
    assert os.listdir(folder) == ["file"]
