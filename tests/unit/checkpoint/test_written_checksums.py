"""Checksums of shards, taken while they are written."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.checkpoint import written_checksums


class _File(io.BytesIO):
    """A file with a name, which notes when it is flushed."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.flushed = name, 0

    def flush(self) -> None:
        self.flushed += 1


def test_checksums_are_those_of_whole_files() -> None:
    """Of several tensors in each of two files that are written in turns; a checksum has eight digits."""
    watched = written_checksums.Checksums(SimpleNamespace(transform_save_stream=lambda item, stream: (stream, [])))
    files = [_File("/somewhere/__0_0.distcp"), _File("/somewhere/__0_1.distcp")]
    for piece in (b"first", b"second", b"", b"third"):
        for file in files:
            stream, _ = watched.transform_save_stream(None, file)
            stream.write(piece)
            stream.write(memoryview(file.name.encode()))
            stream.flush()
    expected = {}
    for file in files:
        path = f"{file.name}.x"
        expected[Path(file.name).name] = {"bytes": len(file.getvalue()), "crc32": _crc(file.getvalue())}
        assert file.flushed >= 4, path
    assert watched.files() == expected
    watched._written = {"/x/small": (3, 0xAB)}
    assert watched.files() == {"small": {"bytes": 3, "crc32": "000000ab"}}


def _crc(content: bytes) -> str:
    """Return the CRC-32 by its definition, a bit at a time."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
    return f"{value ^ 0xFFFFFFFF:08x}"


@pytest.mark.parametrize("before", [False, True])
def test_torchs_own_checksums_are_as_they_were_afterwards(before: bool) -> None:
    at_first = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(before)
        with written_checksums.without_checksums_of_torch():
            assert torch.serialization.get_crc32_options() is False
        assert torch.serialization.get_crc32_options() is before
    finally:
        torch.serialization.set_crc32_options(at_first)
