"""The program before anything is configured."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.cli import pretrain as program
from megatron_ext.config.parse.command_line import read
from megatron_ext.resilience.process_end import RunStatus
from tests.support.wrong_flags import BASE


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
    assert program._save_folder(read(words.split())) == folder
    kept = {path.parent.name for path in tmp_path.glob("*/exit.json")}
    assert kept == {"runs", "--load"} - {folder}


def dry_run(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert program.main(shlex.split(f"{BASE} {words} --dry-run"), RunStatus(rank=0)) == 0
    return capsys.readouterr().out


def test_one_rank_of_a_launcher_prints_the_report_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1"):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        text = dry_run("", capsys)
        assert text.startswith("world size 2 = ") if rank == "0" else not text
        assert "--world-size" not in text


def test_a_report_without_a_launcher_says_that_it_is_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("", capsys).endswith("--world-size 8 shows that of 8.\n")
    assert "--world-size 8 shows" not in dry_run("--world-size 2", capsys)
