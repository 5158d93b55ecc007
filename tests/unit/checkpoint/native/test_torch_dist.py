"""Metadata of a checkpoint from anybody: what it may claim, and where it says that elements lie."""

import errno
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_ext.checkpoint.dtypes import code_of
from megatron_ext.checkpoint.native import safe_reading, torch_dist
from megatron_ext.checkpoint.native.safe_reading import read_part
from megatron_ext.checkpoint.native.torch_archive import archive, place_of_elements, tensor_pickle
from megatron_ext.checkpoint.native.torch_dist import Chunk, Properties, Saved, Tensor
from megatron_ext.untrusted.inert_pickle import read as read_inert


def test_a_dtype_that_no_weights_have_keeps_torchs_name() -> None:
    names = ("bfloat16", "float32", "float16", "float64", "int64", "float8_e4m3fn")
    assert [code_of(name) for name in names] == ["BF16", "F32", "F16", "F64", "int64", "float8_e4m3fn"]


def _content() -> Any:
    """Metadata of two tensors of two chunks each, as data."""
    chunks = tuple(Chunk((row, 0), (1, 3), "__0_0.distcp", 100 * row, 50) for row in range(2))
    both = {name: Tensor("F32", (2, 3), chunks) for name in ("a", "b")}
    return read_inert(torch_dist.write(both, {"o": Chunk((), (), "__0_0.distcp", 7, 8)}), torch_dist.ALLOWED)


def _entry(content: Any, name: str = "a") -> Any:
    return content.state["state_dict_metadata"][name].state


def _properties(content: Any, **changed: Any) -> None:
    made = _entry(content)["properties"]
    names = ("dtype", "layout", "grad", "form", "pinned")
    made.state = tuple({**dict(zip(names, made.state, strict=True)), **changed}.values())


def _named_again(content: Any) -> None:
    _entry(content)["chunks"] *= 2


def _no_tensor(content: Any) -> None:
    content.state["state_dict_metadata"]["a"] = 5


def _compressed(content: Any) -> None:
    next(iter(content.state["storage_data"].values())).state["transform_descriptors"] = ()


def _format(number: int) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        _entry(content)["properties"].state[3].args = (number,)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_named_again, "places 'b' more often than it has places"),
        (_no_tensor, "has 5 where it should describe 'a'"),
        (_compressed, "is compressed, which is not read"),
        (_format(3), "has an unknown memory format"),
        (lambda content: _properties(content, pinned=0), "neither true nor false"),
        (lambda content: _properties(content, grad=None), "neither true nor false"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(change: Callable[[Any], None], said: str) -> None:
    content = _content()
    change(content)
    with pytest.raises(torch_dist.pickle.UnpicklingError, match=said):
        torch_dist._saved(content)


def test_properties_are_read_as_they_are_and_a_chunk_has_one_place() -> None:
    for number in range(3):
        content = _content()
        _format(number)(content)
        _properties(content, grad=True, pinned=False)
        assert torch_dist._saved(content).tensors["a"].properties == Properties(True, number, False, None)
    twice = {"a": Tensor("F32", (2, 3), (Chunk((0, 0), (1, 3), "x", 0, 5),) * 2)}
    with pytest.raises(torch_dist.pickle.UnpicklingError, match="gives a tensor two places"):
        torch_dist.read(io.BytesIO(torch_dist.write(twice, {})))
    most = (1,) * 64
    chunk = Chunk((0,) * 64, most, "x", 0, 5)
    assert torch_dist.read(io.BytesIO(torch_dist.write({"a": Tensor("F32", most, (chunk,))}, {})))["a"].size == most


def test_metadata_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    content = torch_dist.write({}, {})
    monkeypatch.setattr(torch_dist, "_LARGEST", len(content))
    assert torch_dist.read_all(io.BytesIO(content)) == Saved({}, {})
    with pytest.raises(torch_dist.pickle.UnpicklingError, match="larger than"):
        torch_dist.read_all(io.BytesIO(content + b"."))


def _place(folder: Path, content: bytes, dtype: str = "F32") -> int | None:
    (folder / "shard").write_bytes(content)
    with (folder / "shard").open("rb") as file:
        return place_of_elements(file, 0, len(content), (4,), dtype)


def test_elements_are_read_in_place_where_they_lie_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where they are packed, where the tensor begins behind the first, or of another kind of as many bytes."""
    head, tail = archive(tensor_pickle((4,), "F32"), 16)
    whole = head + bytes(16) + tail
    assert _place(tmp_path, whole) == len(head)
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(packed, "w") as new:
        for info in old.infolist():
            is_elements = info.filename == "archive/data/0"
            new.writestr(
                info.filename,
                bytes(16) if is_elements else whole[_begin(whole, info) :][: info.file_size],
                zipfile.ZIP_DEFLATED if is_elements else zipfile.ZIP_STORED,
            )
    assert _place(tmp_path, packed.getvalue()) is None
    pickled = tensor_pickle((4,), "F32")
    assert pickled.count(b"QK\0") == 1
    head, tail = archive(pickled.replace(b"QK\0", b"QK\2"), 16)
    assert _place(tmp_path, head + bytes(16) + tail) is None
    head, tail = archive(tensor_pickle((4,), "BF16"), 8)
    assert _place(tmp_path, head + bytes(8) + tail, "BF16") == len(head)
    assert _place(tmp_path, head + bytes(8) + tail, "F16") is None

    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(OSError, match="Input/output error"):
        _place(tmp_path, whole)


def _begin(whole: bytes, info: zipfile.ZipInfo) -> int:
    at = info.header_offset
    return (
        at
        + 30
        + int.from_bytes(whole[at + 26 : at + 28], "little")
        + int.from_bytes(whole[at + 28 : at + 30], "little")
    )


def test_a_part_is_read_up_to_the_end_of_the_file_and_not_behind_it() -> None:
    values = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    content = b"head" + values.numpy().tobytes()
    for begin, lengths in (((1, 1, 1), (1, 2, 3)), ((0, 0, 0), (2, 3, 4)), ((0, 2, 3), (2, 1, 1))):
        part = values[tuple(slice(at, at + length) for at, length in zip(begin, lengths, strict=True))]
        found = read_part(io.BytesIO(content), 4, values.shape, torch.float32, begin, lengths)
        assert found is not None
        assert torch.equal(found, part)
        assert read_part(io.BytesIO(content[:-1]), 4, values.shape, torch.float32, begin, lengths) is None


def test_torchs_metadata_says_what_the_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(
        {"w": Tensor("BF16", (6, 2), (Chunk((4, 0), (2, 2), "x", 5, 6),), Properties(True, 1, False, (2, 1)))},
        {"o": Chunk((), (), "y", 7, 8)},
    )
    monkeypatch.setattr(torch_dist, "read_all", lambda file: saved)
    for pinned in (False, True):
        object.__setattr__(saved.tensors["w"].properties, "pin_memory", pinned)
        found: Any = safe_reading.read_metadata(io.BytesIO())
        entry = found.state_dict_metadata["w"]
        properties = entry.properties
        assert (properties.dtype, properties.requires_grad, properties.pin_memory) == (torch.bfloat16, True, pinned)
        assert properties.memory_format == torch.channels_last
        assert (entry.size, entry.chunks[0].offsets, entry.chunks[0].sizes) == ((6, 2), (4, 0), (2, 2))
        places = {index: (i.relative_path, i.offset, i.length) for index, i in found.storage_data.items()}
        assert places == {MetadataIndex("w", (4, 0)): ("x", 5, 6), MetadataIndex("o"): ("y", 7, 8)}  # pyright: ignore
        assert [index.index for index in found.storage_data] == [0, None]


SIZES = {"e": 5, "a": 50, "d": 4, "b": 40, "c": 4}
