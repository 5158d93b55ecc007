"""Files of a checkpoint to the tensors and objects that are asked for: in place, by torch, or not at all."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_ext.checkpoint.native import safe_reading, torch_dist
from megatron_ext.checkpoint.native.safe_reading import SafeReader, no_code_from_files, read_metadata
from megatron_ext.checkpoint.native.torch_archive import archive, check_archive, place_of_elements, tensor_pickle
from megatron_ext.checkpoint.native.torch_dist import Chunk, Tensor


def saved(value: Any) -> bytes:
    """What torch writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def checkpoint(folder: Path, objects: dict[str, bytes], tensors: dict[str, tuple[list[int], bytes]]) -> Path:
    """A checkpoint of these archives, all in one file, one after the other; each tensor is one chunk."""
    placed: dict[str, tuple[int, int]] = {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for name, content in {**objects, **{name: archived for name, (_, archived) in tensors.items()}}.items():
            placed[name] = file.tell(), len(content)
            file.write(content)
    whole = {
        name: Tensor("F32", tuple(shape), (Chunk((0,) * len(shape), tuple(shape), "__0_0.distcp", *placed[name]),))
        for name, (shape, _) in tensors.items()
    }
    kept = {name: Chunk((), (), "__0_0.distcp", *placed[name]) for name in objects}
    (folder / ".metadata").write_bytes(torch_dist.write(whole, kept))
    return folder


def test_what_lies_in_order_and_what_torch_puts_right_are_the_same_numbers(tmp_path: Path) -> None:
    numbers = torch.arange(12.0).view(3, 4)
    tensors = {
        "in_order": ([3, 4], saved(numbers)),
        "turned": ([4, 3], saved(numbers.t())),
        "part": ([2, 2], saved(numbers[1:, 1:3])),
    }
    folder = checkpoint(tmp_path, {"object": saved({"rng": torch.ones(2)})}, tensors)
    wanted: dict[str, Any] = {name: torch.empty(shape) for name, (shape, _) in tensors.items()}
    wanted |= {"object": io.BytesIO()}
    load(wanted, storage_reader=SafeReader(folder), no_dist=True)
    assert torch.equal(wanted["in_order"], numbers)
    assert torch.equal(wanted["turned"], numbers.t())
    assert torch.equal(wanted["part"], numbers[1:, 1:3])
    assert torch.equal(wanted["object"]["rng"], torch.ones(2))


def packed(content: bytes, record: str, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """The archive with one of its records compressed."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info), method if info.filename.endswith(record) else None)
    return made.getvalue()


@pytest.mark.parametrize("record", ["data.pkl", "data/0", "byteorder"])
def test_nothing_that_is_compressed_reaches_torch(record: str, tmp_path: Path) -> None:
    objects = {"an object": packed(saved({"rng": torch.ones(2)}), record)}
    folder = checkpoint(tmp_path, objects, {"w": ([2], packed(saved(torch.ones(2)), record))})
    hollow: list[dict[str, Any]] = [{"an object": io.BytesIO()}, {"w": torch.empty(2)}]
    for wanted in hollow:
        with pytest.raises(CheckpointException, match=rf"'{next(iter(wanted))}' in .*'{record}' is compressed"):
            load(wanted, storage_reader=SafeReader(folder), no_dist=True)


def test_an_object_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved({"rng": torch.ones(2)})
    folder = checkpoint(tmp_path, {"object": content}, {})
    for most, message in ((len(content), None), (len(content) - 1, f"it has {len(content):,} bytes")):
        monkeypatch.setattr(safe_reading, "_LARGEST_OBJECT", most)
        if message is None:
            load({"object": io.BytesIO()}, storage_reader=SafeReader(folder), no_dist=True)
            continue
        with pytest.raises(CheckpointException, match=message):
            load({"object": io.BytesIO()}, storage_reader=SafeReader(folder), no_dist=True)


def checked(content: bytes, folder: Path) -> None:
    (folder / "shard").write_bytes(b"before" + content + b"behind")
    with (folder / "shard").open("rb") as file:
        check_archive(file, 6, len(content))


def two_tables(content: bytes) -> bytes:
    """Before the end another table of records, which zipfile takes, since it ends there."""
    hidden = packed(content, "data.pkl")
    *_, count, size, position, _ = struct.unpack("<4s4H2IH", content[-22:])
    table = content[position : position + size]
    end = struct.unpack("<4s4H2IH", hidden[-22:])
    return hidden[:-22] + table + struct.pack("<4s4H2IH", *end[:3], count, count, size, end[6], 0)


def one_record_many_times(content: bytes) -> bytes:
    """A table with a thousand names for the largest record."""
    *_, size, position, _ = struct.unpack("<4s4H2IH", content[-22:])
    table = content[position : position + size]
    at = table.index(b"archive/data/0")
    entry = table[at - 46 : at + 14]
    more = b"".join(entry.replace(b"data/0", b"%06d" % number) for number in range(1000))
    table += more
    count = struct.unpack("<H", content[-12:-10])[0] + 1000
    return content[:position] + table + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(table), position, 0)


def plain(content: bytes) -> bytes:
    """The archive as other programs write it: without numbers of 64 bits."""
    return packed(content, "none of them")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content, None),
        (plain, None),
        (lambda content: content[:-1], "no archive"),
        (lambda content: content + b"x", "no archive"),
        (lambda content: b"x" + content, "no archive"),
        (lambda content: b"", "no archive"),
        (lambda content: pickle.dumps({"rng": 1}), "no archive"),
        (lambda content: packed(content, "data.pkl", zipfile.ZIP_BZIP2), "'data.pkl' is compressed"),
        (lambda content: two_tables(plain(content)), "no archive"),
        (lambda content: one_record_many_times(plain(content)), "its records have 4,"),
    ],
)
def test_only_what_torch_writes_is_an_archive(
    change: Callable[[bytes], bytes], said: str | None, tmp_path: Path
) -> None:
    content = change(saved(torch.arange(1024.0)))
    if said is None:
        checked(content, tmp_path)
        return
    with pytest.raises(pickle.UnpicklingError, match=said):
        checked(content, tmp_path)


def test_no_changed_byte_of_an_archives_end_hides_a_compressed_record(tmp_path: Path) -> None:
    """Whatever is taken, torch reads no more bytes from it than the file has."""
    content = packed(saved(torch.zeros(100_000)), "data/0")
    for at in range(len(content) - 600, len(content)):
        for value in (0, content[at] ^ 1, 255):
            changed = content[:at] + bytes([value]) + content[at + 1 :]
            try:
                checked(changed, tmp_path)
            except pickle.UnpicklingError:
                continue
            with pytest.raises((RuntimeError, pickle.UnpicklingError, EOFError)):
                torch.load(io.BytesIO(changed), weights_only=True)


def test_records_of_more_than_four_gigabytes_are_found(tmp_path: Path) -> None:
    """Their sizes have 64 bits; the file has a hole in place of the elements."""
    size = (1 << 32) + 64
    path = tmp_path / "shard"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", tensor_pickle((size // 4,), "F32"))
    whole = path.read_bytes()
    head = whole[: struct.unpack("<I", whole[-6:-2])[0]]
    name = b"archive/data/0"
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(name), 20) + name
    local += struct.pack("<2H2Q", 1, 16, size, size)
    table = whole[len(head) : -22]
    table += struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(name), 20, 0, 0, 0, 0, len(head)
    )
    table += name + struct.pack("<2H2Q", 1, 16, size, size)
    position = len(head) + len(local) + size
    end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(table), position)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, position + len(table), 1)
    end += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(table), 2**32 - 1, 0)
    with path.open("wb") as file:
        file.write(head + local)
        file.seek(position)
        file.write(table + end)
    with zipfile.ZipFile(path) as read:
        assert read.getinfo("archive/data/0").file_size == size
    length = path.stat().st_size
    with path.open("rb") as file:
        check_archive(file, 0, length)
        assert place_of_elements(file, 0, length, (size // 4,), "F32") == len(head) + len(local)
        with pytest.raises(pickle.UnpicklingError):
            check_archive(file, 0, length - 1)


def test_an_archive_without_elements_is_one(tmp_path: Path) -> None:
    checked(archive(b"\x80\2}.", None)[0], tmp_path)


def test_a_part_of_a_chunk_goes_to_its_place_in_the_tensor(tmp_path: Path) -> None:
    """Rows 1 and 2, columns 2 to 5 of the chunk, to rows 3 and 4, columns 1 to 4."""
    whole = torch.arange(24.0).view(4, 6)
    checkpoint(tmp_path, {}, {"w": ([4, 6], saved(whole))})
    reader, planner, target = SafeReader(tmp_path), DefaultLoadPlanner(), torch.zeros(5, 6)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner({"w": target}, metadata, True)
    place, offsets = MetadataIndex("w", torch.Size((0, 0)), 0), (torch.Size((3, 1)), torch.Size((1, 2)))
    item = ReadItem(LoadItemType.TENSOR, MetadataIndex("w"), offsets[0], place, offsets[1], torch.Size((2, 3)))
    reader.read_data(LoadPlan([item]), planner).wait()
    expected = torch.zeros(5, 6)
    expected[3:5, 1:4] = whole[1:3, 2:5]
    assert torch.equal(target, expected)


def test_metadata_is_parsed_once_in_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = torch_dist.read_inert

    def noted(content: bytes, allowed: Any) -> Any:
        parsed.append(content)
        return parse(content, allowed)

    monkeypatch.setattr(torch_dist, "read_inert", noted)
    one, other = (torch_dist.write({}, {"o": Chunk((), (), "x", 0, length)}) for length in (7, 8))

    def lengths(*contents: bytes) -> list[int]:
        """What is read of each, by torch's own objects, which are made anew."""
        found = [read_metadata(io.BytesIO(content)).storage_data for content in contents]
        assert len({id(places) for places in found}) == len(contents)
        return [place.length for places in found for place in places.values()]

    with no_code_from_files(tmp_path):
        assert lengths(one, one, one, other, other, one) == [7, 7, 7, 8, 8, 7]
        assert parsed == [one, other, one]
    assert lengths(one, one) == [7, 7]
    assert len(parsed) == 5, "nothing is kept afterwards"
