"""One job at a time writes into a save folder, and is named to others; what the folder holds keeps its name."""

import itertools
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.native import lock
from megatron_ext.errors import ConfigurationError

YES_NO = (False, True)


@pytest.fixture
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Locks of a test end with it."""
    for name, empty in (("_open", []), ("_held", {}), ("_contents", {})):
        monkeypatch.setattr(lock, name, empty)
    monkeypatch.setattr(lock, "_now", lambda: "2026-01-02T03:04:05+00:00")
    yield
    for file in lock._open:
        file.close()


@pytest.mark.usefixtures("_no_locks")
@pytest.mark.parametrize(("attempt", "file", "earlier"), itertools.product((0, 1), YES_NO, (None, "name", "damaged")))
def test_a_folder_keeps_its_name_until_it_is_emptied(
    attempt: int, file: bool, earlier: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What begins with a dot is no content; and a folder whose name begins alike is another one."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    save = tmp_path / "save"
    save.mkdir()
    (save / ".hidden").touch()
    if file:
        (save / "iter_0000001").mkdir()
    if earlier is not None:
        (save / ".lock").write_text('{"contents": "as before"}\n' if earlier == "name" else '{"contents"')
    lock.hold_until_exit(save)
    name = lock.name_of_contents(str(save))
    assert (name == "as before") == (earlier == "name" and (file or attempt > 0))
    assert json.loads((save / ".lock").read_text()) == {
        "host": socket.gethostname(), "pid": os.getpid(), "since": "2026-01-02T03:04:05+00:00", "contents": name
    }  # fmt: skip
    assert lock.name_of_contents(tmp_path / "save2") is None
    lock.hold_until_exit(tmp_path / "save2")
    assert lock.name_of_contents(tmp_path / "save2") not in (None, name)
    (tmp_path / "link").symlink_to(save)
    assert lock.name_of_contents(tmp_path / "link") == name


@pytest.mark.usefixtures("_no_locks")
def test_who_holds_a_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(lock, "warn", said.append)

    def refuse(number: int) -> Any:
        def lockf(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        return SimpleNamespace(lockf=lockf, LOCK_EX=0, LOCK_NB=0)

    holder = '{"host": "node3", "pid": 77, "since": "then", "contents": "x"}'
    starting = "one that is just starting"
    for content, who in ((holder, "process 77 on node3, since then"), ("", starting), ("{", starting)):
        (tmp_path / ".lock").write_text(content)
        for number in lock._TAKEN:
            monkeypatch.setattr(lock, "fcntl", refuse(number))
            with pytest.raises(ConfigurationError) as caught:
                lock.hold_until_exit(tmp_path)
            assert str(caught.value) == (
                f"--save {tmp_path} is in use by another job: {who}; give another folder with --save, or end that job "
                "first (its lock ends with it)"
            )
            assert lock.is_held(tmp_path)
            assert (tmp_path / ".lock").read_text() == content
    monkeypatch.setattr(lock, "fcntl", refuse(95))
    lock.hold_until_exit(tmp_path)
    assert said == [f"{tmp_path} cannot be locked (Operation not supported): start no second job there"]
    assert not lock.is_held(tmp_path)
    assert not lock.is_held(tmp_path / "none")


@pytest.mark.usefixtures("_no_locks")
@pytest.mark.parametrize("lost", [None, "lock", "folder", "another's"])
def test_a_folder_that_was_removed_is_locked_again(
    lost: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(lock, "warn", said.append)
    save = tmp_path / "save"
    lock.hold_again(save)
    assert not save.exists(), "it was never locked"
    lock.hold_until_exit(save)
    before = lock.name_of_contents(save)
    if lost:
        (save / ".lock").rename(tmp_path / "lost")
    if lost == "folder":
        save.rmdir()
    if lost == "another's":
        (save / ".lock").touch()
    lock.hold_again(save)
    assert (lock.name_of_contents(save) == before) == (lost is None)
    text = f"--save {save} or its .lock was removed while this job is at work there: earlier files may be gone"
    assert said == ([text] if lost else [])
    assert (save / ".lock").exists()
    lock.hold_again(save)
    assert len(said) == (1 if lost else 0)
