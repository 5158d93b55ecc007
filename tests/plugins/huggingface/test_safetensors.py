"""Headers of safetensors files, read and written."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import DataError
from megatron_ext.plugins.huggingface.safetensors import create, read_header


def _file(path: Path, header: dict[str, Any], size: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def test_tensors_may_be_listed_in_any_order_and_have_64_dimensions(tmp_path: Path) -> None:
    header = {
        "last": {"dtype": "F32", "shape": [1] * 64, "data_offsets": [4, 8]},
        "first": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    found = read_header(_file(tmp_path / "x", header, 8))
    assert {name: entry.offset - found["first"].offset for name, entry in found.items()} == {"last": 4, "first": 0}
    header["last"]["shape"] = [1] * 65
    with pytest.raises(DataError, match="the entry of tensor last contradicts itself"):
        read_header(_file(tmp_path / "x", header, 8))


def test_a_file_has_room_for_exactly_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header is a multiple of eight bytes, and no longer than that asks for."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=40))
    for length in range(1, 10):
        entry = create(tmp_path / "x", {"n" * length: (10,)}, "F32")["n" * length]
        header = (tmp_path / "x").read_bytes()[8 : entry.offset]
        assert len(header) % 8 == 0
        assert len(header) - len(header.rstrip(b" ")) < 8
    with pytest.raises(OSError, match=r"44 bytes are needed, 40 are free"):
        create(tmp_path / "x", {"n": (11,)}, "F32")
