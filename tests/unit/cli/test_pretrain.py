"""The program before anything is configured."""

from pathlib import Path

import pytest

from megatron_ext.cli import pretrain as program


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("--save runs --lr 1", "runs"),
        ("--lr 1 --save=runs", "runs"),
        ("--save runs --dry-run", None),
        ("--lr 1", None),
        ("--save", None),
        ("--save --load", None),
        ("--save --load ckpt", None),
    ],
)
def test_the_folder_of_the_record_is_what_the_command_line_names(
    words: str, folder: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A flag that follows --save is no folder: what lies in one of that name is left alone."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs", "--load"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "exit.json").write_text("{}")
    assert program._save_folder(words.split()) == folder
    kept = {path.parent.name for path in tmp_path.glob("*/exit.json")}
    assert kept == {"runs", "--load"} - {folder}
