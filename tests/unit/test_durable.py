"""A file is replaced whole or not at all, and is on the disk before it has its name."""

import errno
import os
from pathlib import Path

import pytest

from megatron_ext.durable import replacing, sync, sync_file


def fail_in_the_middle(path: Path, kind: type[BaseException]) -> None:
    with replacing(path) as file:
        file.write(b"half of the ne")
        raise kind("in the middle")


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_nothing_else(kind: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(kind, match="in the middle"):
        fail_in_the_middle(path, kind)
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


def test_a_pair_of_files_may_be_written_side_by_side(tmp_path: Path) -> None:
    with replacing(tmp_path / "data.bin") as first, replacing(tmp_path / "data.idx") as second:
        first.write(b"tokens")
        second.write(b"index")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "data.bin": b"tokens",
        "data.idx": b"index",
    }


def test_what_is_waited_for_is_all_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((descriptor, path.read_text())))
    with path.open("w") as file:
        file.write("a few words")
        sync_file(file)
        assert synced == [(file.fileno(), "a few words")]


def test_a_file_or_a_folder_of_a_name_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is given back, whatever the disk says."""
    (tmp_path / "file").touch()
    synced: list[Path] = []
    failing = False

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if failing:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    before = os.listdir("/proc/self/fd")
    sync(tmp_path / "file")
    sync(tmp_path)
    failing = True
    with pytest.raises(OSError, match="Input/output error"):
        sync(tmp_path)
    assert synced == [tmp_path / "file", tmp_path, tmp_path]
    assert len(os.listdir("/proc/self/fd")) == len(before)
