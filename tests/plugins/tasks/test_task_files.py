"""Prompts and documents in files: where a line ends, and what a line must have."""

from pathlib import Path

import pytest

from megatron_ext.errors import DataError, StorageError
from megatron_ext.plugins.tasks import task_files


def test_lines_of_files_end_with_line_feeds_alone(tmp_path: Path) -> None:
    """Unicode has other ends of lines, which may stand in a text; a mark of the byte order is no part of it."""
    odd = "a\u2028b\u0085c\x0cd"
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(f'\ufeff{{"prompt": "{odd.replace(chr(12), "")}"}}\n \n\r\n{{"prompt": ""}}\r\n'.encode())
    found = list(task_files.read_items(path, ["prompt"]))
    assert found == [(f"{path}:1", {"prompt": odd.replace("\x0c", "")}), (f"{path}:4", {"prompt": ""})]
    for name in ("p.json", "p.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x", "text": "y"}')
        assert task_files.read_prompts(tmp_path / name) == ["x"]
        assert task_files.read_documents(tmp_path / name) == ["y"]
    (tmp_path / "p.txt").write_bytes(f"\ufeff{odd}\r\n\n  \nlast".encode())
    assert task_files.read_prompts(tmp_path / "p.txt") == [odd, "  ", "last"]
    assert task_files.read_documents(tmp_path / "p.txt") == [f"{odd}\r\n\n  \nlast"]
    for wrong in ('["prompt"]', '"prompt"', "{}"):
        path.write_text(f"\n{wrong}\n")
        with pytest.raises(DataError, match=r"jsonl:2: no prompt; a line must be an object with prompt"):
            list(task_files.read_items(path, ["prompt"]))


def test_a_file_that_is_no_text_or_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin1"))
    with pytest.raises(DataError, match=r"latin1\.txt: .*; give a text in UTF-8$"):
        task_files.read_text(tmp_path / "latin1.txt")
    with pytest.raises(StorageError, match=r"none\.txt: No such file or directory; give the path"):
        task_files.read_prompts(tmp_path / "none.txt")
