"""Prompts and items of tasks as files hold them."""

from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.inference.files import read_documents, read_items, read_prompts


def test_files_of_items(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"text": "a\\nb"}\n\n{"text": "c"}\n')
    assert read_documents(path) == ["a\nb", "c"]
    (tmp_path / "all.txt").write_text("a\nb\n")
    assert read_documents(tmp_path / "all.txt") == ["a\nb\n"]
    assert read_prompts(tmp_path / "all.txt") == ["a", "b"]
    (tmp_path / "all.txt").write_bytes("a\u2028b\x0cc\r\n\né\n".encode())
    assert read_prompts(tmp_path / "all.txt") == ["a\u2028b\x0cc", "é"], "a line of a prompt file ends where JSON's do"
    path.write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    assert read_documents(path) == ["a\u2028b"]
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"items\.jsonl:2: no text"):
        list(read_items(path, ["text"]))
    path.write_text('{"text": 4}\n')
    with pytest.raises(DataError, match=r"items\.jsonl:1: text is int"):
        read_documents(path)
