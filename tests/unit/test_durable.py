"""A file is replaced whole or not at all, and is on the disk before it has its name."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.checkpoint.native import checkpoint_folder as checkpoints
from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import check_indexed_files
from megatron_ext.data.mask import COUNTS, Mask
from megatron_ext.durable import check_space, described, naming, replace_text, replacing, sync, sync_file
from megatron_ext.plugins.prepare.journal import Journal
from megatron_ext.plugins.prepare.merge import merge_indexed_files
from tests.support.crashes import Disk
from tests.support.full_disk import files_up_to


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


def _write(save: Path, iteration: int, content: bytes) -> None:
    """All files of a checkpoint, not yet under its name."""
    partial = checkpoints.make_partial(save, iteration)
    (partial / "tokenizer").mkdir()
    for name in ("__0_0.distcp", ".metadata", "metadata.json", "tokenizer/vocab.json"):
        (partial / name).write_bytes(name.encode() + content)
    checkpoint_manifest.write(partial, checkpoint_manifest.describe(partial, checkpoint_manifest.all_files(partial)))


def _loaded(save: Path) -> tuple[int, bytes]:
    """What a run resumes from; every checkpoint with a name is whole."""
    for iteration in checkpoints.saved_iterations(save):
        path = checkpoints.iteration_folder(save, iteration)
        files = checkpoint_manifest.read(path)
        assert files is not None
        assert len(files) == 4
        assert checkpoint_manifest.problems(path, files) == []
    found = checkpoints.find_latest(save)
    assert found is not None
    return found.iteration, (found.path / "__0_0.distcp").read_bytes().removeprefix(b"__0_0.distcp")


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Two checkpoints, of iterations 1 and 2."""
    folder = tmp_path / "save"
    for iteration in (1, 2):
        _write(folder, iteration, b"first course")
        checkpoints.publish(folder, iteration)
    return folder


@pytest.mark.parametrize("iteration", [3, 2], ids=["a new one", "in place of another course's"])
def test_a_checkpoint_is_published_whole(
    iteration: int, save: Path, tmp_path: Path, watched_disk: Callable[[Path], Disk]
) -> None:
    disk = watched_disk(save)
    _write(save, iteration, b"second course")
    before = len(disk.calls)
    checkpoints.publish(save, iteration)
    disk.end()
    left = [(call, _loaded(path)) for call, path in disk.crashes(tmp_path / "left")]
    assert {found for _, found in left} <= {(1, b"first course"), (2, b"first course"), (iteration, b"second course")}
    assert [found for _, found in left[-2:]] == [(iteration, b"second course")] * 2, "it is there when publish returns"
    assert left[0][1] == (2, b"first course")
    _assert_order(disk.calls[before:], iteration)


def _assert_order(calls: list[str], iteration: int) -> None:
    """The files and folders of the checkpoint; its name, and that of its folder's list; the tracker, and again."""
    partial, final = f".iter_000000{iteration}.partial", f"iter_000000{iteration}"
    files = ("__0_0.distcp", ".metadata", "metadata.json", "manifest.json", "tokenizer", "tokenizer/vocab.json")
    named = calls.index(f"rename {partial} {final}")
    assert {call for call in calls[:named] if call.startswith("fsync")} == {
        f"fsync {partial}",
        *(f"fsync {partial}/{name}" for name in files),
    }
    tracker, temporary = checkpoints.TRACKER, f".{checkpoints.TRACKER}.tmp"
    rest = [call for call in calls[named + 1 :] if call.startswith(("fsync", "replace"))]
    assert rest == ["fsync .", f"fsync {temporary}", f"replace {temporary} {tracker}", "fsync ."]


def test_a_removed_checkpoint_is_whole_or_gone(
    save: Path, tmp_path: Path, watched_disk: Callable[[Path], Disk]
) -> None:
    disk = watched_disk(save)
    checkpoints.remove(save, 1)
    disk.end()
    assert len(disk.calls) > 6
    for _, path in disk.crashes(tmp_path / "left"):
        assert _loaded(path) == (2, b"first course")
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000002", checkpoints.TRACKER]


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path, watched_disk: Callable[[Path], Disk]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    disk = watched_disk(folder)
    with replacing(folder / "file") as file:
        file.write(b"new")
    disk.end()
    left = [(path / "file").read_bytes() for _, path in disk.crashes(tmp_path / "left")]
    assert left[0] == b"old"
    assert left[-2] == b"new"
    assert set(left) == {b"old", b"new"}


def _pair(prefix: Path, tokens: list[int], *, masked: bool) -> None:
    """A pair, in which the even tokens count where it has a mask."""
    with IndexedWriter(prefix, np.uint16, packed_to=8 if masked else None) as writer:
        values = np.array(tokens, np.uint16)
        flags = np.where(values % 2 == 0, COUNTS, 0).astype(np.uint8) if masked else None
        writer.add_tokens(values.tobytes(), [len(tokens)], flags)


def _tokens(prefix: Path, *, masked: bool) -> list[int] | None:
    """Those of a pair; None where it has no index, without which it is none."""
    if not prefix.with_suffix(".idx").exists():
        return None
    check_indexed_files(str(prefix))
    tokens = np.fromfile(prefix.with_suffix(".bin"), np.uint16).tolist()
    if masked:
        flags = Mask(str(prefix), len(tokens)).read(0, len(tokens)) & COUNTS
        assert flags.astype(bool).tolist() == [token % 2 == 0 for token in tokens]
    return tokens


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_a_pair_is_replaced_by_another(
    merged: bool, masked: bool, tmp_path: Path, watched_disk: Callable[[Path], Disk]
) -> None:
    """With its mask, which says which of its tokens count."""
    folder = tmp_path / "folder"
    folder.mkdir()
    _pair(folder / "text", [1, 2, 3], masked=masked)
    _pair(tmp_path / "other", [4, 5], masked=masked)
    disk = watched_disk(folder)
    if merged:
        merge_indexed_files([str(tmp_path / "other")], str(folder / "text"))
    else:
        _pair(folder / "text", [4, 5], masked=masked)
    disk.end()
    left = [_tokens(path / "text", masked=masked) for _, path in disk.crashes(tmp_path / "left")]
    assert left[:2] == [[1, 2, 3]] * 2
    assert left[-2:] == [[4, 5]] * 2
    assert all(found in ([1, 2, 3], None, [4, 5]) for found in left)
    assert None in left, "there is a moment without an index, and none with that of the other"


def test_a_journal_speaks_of_what_is_on_the_disk(tmp_path: Path, watched_disk: Callable[[Path], Disk]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    disk = watched_disk(folder)
    writer, journal = IndexedWriter(folder / "text", np.uint16), Journal(job={})
    for number in range(3):
        writer.add_tokens(np.array([number] * 4, np.uint16).tobytes(), [4])
        journal.written = [writer.commit()]
        journal.save(folder / "text.partial.json")
    writer.close()
    disk.end()
    told = set()
    for call, path in disk.crashes(tmp_path / "left"):
        found = Journal.load(path / "text.partial.json")
        if found is None:
            assert not (path / "text.partial.json").exists(), "torn"
            continue
        [written] = found.written
        assert IndexedWriter.holds(path / "text", written), call
        tokens = np.fromfile(path / "text.bin.partial", np.uint16)[: written.token_bytes // 2]
        assert tokens.tolist() == [number for number in range(written.documents) for _ in range(4)]
        told.add(written.documents)
    assert told == {1, 2, 3}
    assert json.loads((folder / "text.partial.json").read_text())["written"][0]["documents"] == 3


def test_a_text_without_room_leaves_the_old_one_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with files_up_to(10), pytest.raises(OSError) as caught:  # noqa: PT011 (its fields are what is compared)
        replace_text(path, "new and longer")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    said = f"{path} cannot be written: File too large; free space, or give another place"
    assert described(caught.value) == said
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["page.html"])
    with pytest.raises(OSError, match="No space left") as caught:
        replace_text("/dev/full", "a text")
    assert described(caught.value).startswith("/dev/full cannot be written: No space left on device (")


def test_a_text_goes_where_a_link_leads_and_into_a_device(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for text in ("first", "second"):
        replace_text(link, text)
        assert (path.read_text(), link.readlink()) == (text, path)
    replace_text(os.devnull, "nowhere")
    assert Path(os.devnull).is_char_device()
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match=rf"{name}"):
            replace_text(name, "a text")


def test_space_is_checked_before(tmp_path: Path) -> None:
    check_space(tmp_path / "file", 1)
    room = rf"\({1 << 60:,} bytes are needed, [\d,]+ are free\)"
    with pytest.raises(OSError, match=f"No space left on device {room}") as caught:
        check_space(tmp_path / "file", 1 << 60)
    assert caught.value.filename == str(tmp_path / "file")
    with pytest.raises(OSError, match="/other") as caught, naming(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "/other")
