"""The file of one rank's snapshot: every bit comes back, and every damage is seen."""

from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.local import rank_file
from megatron_ext.checkpoint.local.agreement import _why_not
from megatron_ext.errors import DataError


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "a": torch.randn(3, 5, dtype=torch.float32),
        "scalar": torch.tensor(7.0, dtype=torch.float64),
        "half": torch.randn(33).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "turned": torch.randn(4, 6).t().contiguous(),
        "none": torch.empty(0),
    }


def written(folder: Path) -> Path:
    path = folder / "rank_00000"
    size = rank_file.write(path, {"iteration": 4, "number": 0.1}, tensors())
    assert size == path.stat().st_size
    assert [entry.name for entry in folder.iterdir()] == ["rank_00000"]
    return path


def test_every_bit_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path)
    header = rank_file.read_header(path)
    assert header is not None
    assert (header["iteration"], header["number"]) == (4, 0.1)
    assert rank_file.is_intact(path)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    rank_file.restore(path, into)
    for name, tensor in tensors().items():
        assert torch.equal(into[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_every_flipped_or_missing_byte_is_seen(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    for place in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert not rank_file.is_intact(path), place
        rank_file.read_header(path)  # may find nothing, and fails on nothing
    for length in (0, 3, 20, len(content) - 1):
        path.write_bytes(content[:length])
        assert not rank_file.is_intact(path)
        rank_file.read_header(path)
    path.write_bytes(content + b"x")
    assert not rank_file.is_intact(path)


def test_other_tensors_are_refused_before_any_is_copied(tmp_path: Path) -> None:
    path = written(tmp_path)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()} | {"a": torch.zeros(5, 3)}
    with pytest.raises(DataError, match="of another run: 1 of its tensors differ, a the first"):
        rank_file.restore(path, into)
    assert not into["half"].any()


def test_a_snapshot_of_another_layout_or_course_is_not_used() -> None:
    header = {"layout": {"world_size": 4, "pipeline_model_parallel_size": 2}, "checkpoint": 10}
    same = dict(header["layout"])  # pyright: ignore[reportArgumentType]
    assert _why_not(header, same, 10) == ""
    assert _why_not(header, same, 12) == ""
    assert _why_not(header, {**same, "world_size": 2}, 10) == "it is of another layout (--world-size 4, now 2)"
    assert "follows on the checkpoint of iteration 10" in _why_not(header, same, 5)
    assert _why_not(None, same, 10) == _why_not({"layout": 3}, same, 10) == "it has a file that is not whole"
