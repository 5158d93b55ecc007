"""Old checkpoints go when the newest is whole. tests/distributed/test_checkpoint.py has links and a damaged newest."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import retention
from megatron_ext.checkpoint.native.checkpoint_folder import iteration_folder, saved_iterations
from megatron_ext.checkpoint.native.checkpoint_manifest import MANIFEST
from megatron_ext.checkpoint.native.retention import expired, remove_expired
from megatron_ext.checkpoint.native.save import save_checkpoint
from tests.support.checkpoints import FLAGS, train, trained_alone


@pytest.mark.parametrize(
    ("saved", "newest", "keep_last", "interval", "gone"),
    [
        ([10, 20, 30], 30, None, None, []),
        ([30, 10, 20], 30, 2, None, [10]),
        ([10, 20, 30], 30, 1, None, [10, 20]),
        ([10, 20, 30], 30, 9, None, []),
        ([10, 20, 30], 20, 1, None, [10]),  # 30 is of the course that was given up
        ([10, 20, 30, 40, 50], 30, 2, None, [10]),
        ([10, 20, 30], 30, None, 20, [10]),
        ([10, 20, 30, 40, 50], 50, None, 20, [10, 30]),
        ([10, 20, 30, 40], 40, 1, 20, [10, 30]),
        ([9, 11, 0, 10, 100], 100, 1, 10, [9, 11]),
    ],
)
def test_which_checkpoints_expire(
    saved: list[int], newest: int, keep_last: int | None, interval: int | None, gone: list[int]
) -> None:
    assert expired(saved, newest, keep_last, interval) == gone
    assert expired(saved[::-1], newest, keep_last, interval) == gone, "in whatever order they are found"


def test_older_checkpoints_stay_where_the_newest_has_no_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be removed is named, and the rest goes."""
    run = trained_alone(FLAGS)
    for _ in range(3):
        train(run, 1)
        save_checkpoint(run, tmp_path)
    run = trained_alone([*FLAGS, "--save", str(tmp_path), "--keep-last-checkpoints", "1"])
    newest = iteration_folder(tmp_path, 3)
    (newest / MANIFEST).rename(tmp_path / "manifest")
    remove_expired(run, tmp_path, 3)
    assert saved_iterations(tmp_path) == [1, 2, 3]
    said = f"{newest} is not whole (manifest.json is missing): earlier checkpoints are kept. Check the disk"
    assert said in capsys.readouterr().err
    (tmp_path / "manifest").rename(newest / MANIFEST)
    genuine = retention.remove

    def remove(folder: Any, step: int) -> None:
        if step == 1:
            raise OSError(13, "Permission denied")
        genuine(folder, step)

    monkeypatch.setattr(retention, "remove", remove)
    remove_expired(run, tmp_path, 3)
    assert saved_iterations(tmp_path) == [1, 3]
    assert f"{iteration_folder(tmp_path, 1)} cannot be removed: Permission denied" in capsys.readouterr().err
