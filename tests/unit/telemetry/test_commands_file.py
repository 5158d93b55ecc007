"""The command of each start of a run is kept next to its metrics."""

import shlex
import sys
from pathlib import Path

import pytest

from megatron_ext.telemetry.commands_file import NAME, Start, record_start, starts

WORDS = ["--lr", "0.1", "--data-path", "a b's\nc"]


@pytest.mark.parametrize(
    ("before", "program"),
    [
        (["/usr/bin/megatron-ext", "pretrain"], ["megatron-ext", "pretrain"]),
        (["/x/megatron_ext/__main__.py", "pretrain"], ["megatron-ext", "pretrain"]),
        (["pretrain_gpt.py"], ["python", "pretrain_gpt.py"]),
        (["my own.py"], ["python", "my own.py"]),
        (["other.py", "--flag"], ["megatron-ext", "pretrain"]),
    ],
)
def test_a_start_is_a_line_that_a_shell_repeats(
    before: list[str], program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*before, *WORDS])
    record_start(tmp_path, WORDS, 8)
    [start] = starts(tmp_path)
    assert shlex.split(start.command) == [*program, *WORDS]
    assert start.ranks == 8


def test_flags_of_a_call_from_python_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["notebook.py", "kernel.json"])
    record_start(tmp_path, WORDS, 1)
    assert shlex.split(starts(tmp_path)[0].command) == ["megatron-ext", "pretrain", *WORDS]


def test_starts_are_read_in_order_without_lines_that_are_none(tmp_path: Path) -> None:
    assert starts(tmp_path) == []
    for ranks in (1, 2):
        record_start(tmp_path, [], ranks)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"time": 5}\nno row\n{"time": "t", "ranks": 3, "command": "c"}\n{"torn')
    found = starts(tmp_path)
    assert [start.ranks for start in found] == [1, 2, 3]
    assert found[-1] == Start("t", 3, "c")


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    record_start(tmp_path / "missing", WORDS, 1)
    assert not (tmp_path / "missing").exists()
