"""Files of torch.save are read as data: tensors as places in the file, objects as their attributes, nothing called."""

import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.errors import DataError
from megatron_ext.plugins.huggingface.safetensors import Entry
from megatron_ext.plugins.migrate.deepspeed_checkpoint import torch_file


def test_tensors_and_attributes_are_what_was_saved(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    content = {
        "whole": base.view(4, 6),
        "part": base[6:18].view(2, 6),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "learned": torch.nn.Parameter(torch.full((2,), 7.0)),
        "numbers": torch.arange(3),
        "turned": base.view(4, 6).t(),
        "args": Namespace(layers=2, dtype=torch.bfloat16, names=["a", None, 1.5]),
        "inner": OrderedDict(a=1, b=(True, "x")),
    }
    torch.save(content, tmp_path / "file.pt")
    found = torch_file.read(tmp_path / "file.pt")
    arrays = {name: one.whole() for name, one in found.items() if isinstance(one, Entry)}
    assert arrays.keys() == {"whole", "part", "half", "learned"}, "of weights, and in order"
    for name in ("whole", "part", "learned"):
        assert np.array_equal(arrays[name], content[name].detach().numpy())
    assert arrays["half"].tolist() == [0x3F80] * 3
    assert found["args"] == {"layers": 2, "dtype": None, "names": ["a", None, 1.5]}
    assert found["inner"] == {"a": 1, "b": (True, "x")}


class _Runs:
    def __init__(self, command: Any):
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_nothing_that_a_file_asks_for_happens(tmp_path: Path) -> None:
    torch.save({"a": _Runs(f"touch {tmp_path}/ran"), "b": torch.ones(2)}, tmp_path / "file.pt")
    assert torch_file.read(tmp_path / "file.pt")["b"].whole().tolist() == [1.0, 1.0]
    assert not (tmp_path / "ran").exists()


def _wide(depth: int) -> list[Any]:
    found: list[Any] = [1]
    for _ in range(depth):
        found = [found] * 10
    return found


@pytest.mark.parametrize(("content", "said"), [(_wide(9), r"1,000,000 values"), (_wide(60), "more than 50 levels")])
def test_what_would_be_followed_for_ever_is_refused(content: Any, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(DataError, match=said):
        torch_file.read(tmp_path / "file.pt")


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no archive", pickle.dumps({"a": 1})])
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"file\.pt cannot be read: .*write it anew with torch\.save"):
        torch_file.read(tmp_path / "file.pt")
