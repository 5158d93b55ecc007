"""The checksums of a manifest find every changed byte of the data: at the start, or while a run reads it."""

import itertools
import json
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data import data_manifest as background
from megatron_ext.data.data_manifest import (
    BLOCK,
    BackgroundCheck,
    Block,
    checksums,
    damage,
    first_damage,
    known_blocks,
    made_with,
    some_blocks,
)
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare.merge import merge_indexed_files
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from tests.support.patched_in_one_module import replace_in


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A pair of 64 kB of tokens with a manifest of blocks of 1 kB."""
    prefix = str(tmp_path / "x_text_document")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens((np.arange(32_768) % 61).astype(np.uint16).tobytes(), [32] * 1024)
    _write_manifest(prefix, checksums([prefix], 1024))
    return prefix


def _write_manifest(prefix: str, found: object) -> None:
    content = {"tokenizer": {}, "outputs": {prefix: {"token_bytes": 65_536}}, "checksums": found}
    Path(f"{prefix}_manifest.json").write_text(json.dumps(content))


def test_every_changed_byte_is_found(prefix: str) -> None:
    blocks = known_blocks(prefix)
    assert first_damage(blocks) is None
    assert sum(block.size for block in blocks) == sum(Path(prefix + s).stat().st_size for s in (".bin", ".idx"))
    whole = Path(f"{prefix}.bin").read_bytes()
    for place in range(0, len(whole), 977):
        Path(f"{prefix}.bin").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = first_damage(blocks)
        assert found is not None
        assert f"bytes {place // 1024 * 1024} to {place // 1024 * 1024 + 1023} have the checksum" in found


def test_zeros_of_the_right_size_are_found_before_the_first_step(prefix: str) -> None:
    Path(f"{prefix}.bin").write_bytes(bytes(65_536))
    blocks = some_blocks(known_blocks(prefix))
    assert len(blocks) == 8
    assert damage(blocks[0]) is not None


def test_the_background_finds_the_last_block(prefix: str) -> None:
    blocks = known_blocks(prefix)
    check = BackgroundCheck(blocks, pause=lambda seconds: True)
    check._thread.join(20)
    assert check.checked == len(blocks)
    check.check()
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    check = BackgroundCheck(blocks, pause=lambda seconds: True)
    check._thread.join(20)
    with pytest.raises(DataError, match=r"\.idx: bytes .* --verify-data off trains on it as it is"):
        check.check()


def test_the_background_takes_a_hundredth_of_a_core(tmp_path: Path) -> None:
    """The rests that it asks for, against the processor time that the thread itself has used."""
    prefix = str(tmp_path / "x")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(bytes(64 << 20), [1 << 24, 1 << 24])
    _write_manifest(prefix, checksums([prefix]))
    content = json.loads(Path(f"{prefix}_manifest.json").read_text())
    content["outputs"][prefix]["token_bytes"] = 64 << 20
    Path(f"{prefix}_manifest.json").write_text(json.dumps(content))
    used: list[float] = []
    rests: list[float] = []

    def pause(seconds: float) -> bool:
        rests.append(seconds)
        used.append(time.thread_time())
        return True

    blocks = known_blocks(prefix)
    assert [block.size for block in blocks[:4]] == [BLOCK] * 4
    check = BackgroundCheck(blocks, pause)
    check._thread.join(60)
    assert check.checked == len(blocks)
    share = (used[-1] - used[0]) / sum(rests[1:])
    assert share < 0.015, "processor time for each second of rest"


@pytest.mark.parametrize(("processes", "rest"), [(1, 99.0), (4, 399.0)])
def test_the_processes_of_a_machine_share_the_hundredth(
    prefix: str, processes: int, rest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_second_later = itertools.count().__next__  # at each reading
    replace_in(monkeypatch, background, "time", thread_time=a_second_later)
    rests: list[float] = []
    check = BackgroundCheck(known_blocks(prefix), lambda seconds: not rests.append(seconds), processes=processes)
    check._thread.join(20)
    assert rests == pytest.approx([rest] * len(rests))
    assert len(rests) >= 64


def test_a_file_that_is_replaced_or_removed_while_it_trains_is_left_out(prefix: str) -> None:
    """The run has the other one open; to end it would be wrong."""
    blocks = [block for block in known_blocks(prefix) if block.path.endswith(".bin")]
    began, go_on = threading.Event(), threading.Event()

    def pause(seconds: float) -> bool:
        began.set()
        return go_on.wait(20)

    for replacement in (bytes(1 << 16), None):
        began.clear()
        go_on.clear()
        check = BackgroundCheck(blocks, pause)
        assert began.wait(20)
        path = Path(f"{prefix}.bin")
        whole = path.read_bytes()
        path.unlink()
        if replacement is not None:
            path.with_suffix(".new").write_bytes(replacement)
            path.with_suffix(".new").rename(path)
        go_on.set()
        check._thread.join(20)
        check.check()
        assert check.checked < len(blocks)
        path.write_bytes(whole)


def test_a_pair_that_is_not_there_has_no_blocks(tmp_path: Path) -> None:
    assert known_blocks(str(tmp_path / "none")) == []


def test_a_run_that_ends_ends_the_check(prefix: str) -> None:
    check = BackgroundCheck(known_blocks(prefix))
    check.close()
    assert "data-check" not in [thread.name for thread in threading.enumerate() if thread is check._thread]
    check.check()


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {"other": {}},
        {"PREFIX": {"block_bytes": 0, "crc32": {".bin": [], ".idx": []}}},
        {"PREFIX": {"block_bytes": True, "crc32": {".bin": [], ".idx": []}}},
        {"PREFIX": {"block_bytes": 1 << 40, "crc32": {".bin": ["00000000"], ".idx": ["00000000"]}}},
        {"PREFIX": {"block_bytes": 1024, "crc32": {".bin": ["00000000"]}}},
        {"PREFIX": {"block_bytes": 1024, "crc32": {".bin": [0] * 64}}},
        {"PREFIX": {"block_bytes": 1024, "crc32": []}},
    ],
)
def test_a_manifest_that_makes_no_sense_says_nothing(prefix: str, found: object) -> None:
    if isinstance(found, dict):
        found = {name.replace("PREFIX", prefix): value for name, value in found.items()}
    _write_manifest(prefix, found)
    assert known_blocks(prefix) == []


def test_preprocessing_and_merging_write_checksums(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n{"text": "four"}\n')
    for name in ("a", "b"):
        encode_files(EncodeJob((str(tmp_path / "a.jsonl"),), str(tmp_path / name), "ByteTokenizer"))
    parts = [str(tmp_path / f"{name}_text_document") for name in ("a", "b")]
    merge_indexed_files(parts, str(tmp_path / "all"))
    for prefix in (*parts, str(tmp_path / "all")):
        assert made_with(prefix) is not None
        blocks = known_blocks(prefix)
        assert {Path(block.path).suffix for block in blocks} == {".bin", ".idx"}
        assert first_damage(blocks) is None


def test_a_renamed_pair_keeps_its_checksums(prefix: str) -> None:
    moved = prefix.replace("x_text_document", "y")
    for suffix in (".bin", ".idx", "_manifest.json"):
        Path(prefix + suffix).rename(moved + suffix)
    assert len(known_blocks(moved)) == 64 + 21


@pytest.mark.parametrize(
    ("count", "numbers"),
    [
        (0, []),
        (1, [0]),
        (2, [0, 1]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, [0, 1, 2, 3, 4, 5, 6, 8]),
        (106, [0, 15, 30, 45, 60, 75, 90, 105]),
    ],
)
def test_blocks_of_the_start_reach_from_the_first_to_the_last(count: int, numbers: list[int]) -> None:
    blocks = [Block("x.bin", 1024 * number, 1024, "00000000") for number in range(count)]
    assert [block.first // 1024 for block in some_blocks(blocks)] == numbers


def test_a_block_ends_within_its_file_and_its_damage_says_where(prefix: str) -> None:
    """Checksums have eight digits, whatever they begin with."""
    size = Path(f"{prefix}.idx").stat().st_size
    blocks = [block for block in known_blocks(prefix) if block.path == f"{prefix}.idx"]
    assert [block.first for block in blocks] == list(range(0, size, 1024))
    assert [block.size for block in blocks] == [1024] * (size // 1024) + [size % 1024]
    content = Path(f"{prefix}.idx").read_bytes()
    Path(f"{prefix}.idx").write_bytes(content[:-1] + b"\xff")
    found = damage(blocks[-1])
    assert found is not None
    assert found.startswith(f"{prefix}.idx: bytes {size // 1024 * 1024} to {size - 1} have the checksum ")
    # CRC-32 of no bytes is 0.
    assert damage(Block(f"{prefix}.bin", 0, 0, "00000000")) is None


def _entry(size: int, block_bytes: int = 1024) -> dict[str, Any]:
    counts = {".bin": size // 1024, ".idx": 21}
    return {
        "block_bytes": block_bytes,
        "crc32": {suffix: [f"{number:08x}" for number in range(count)] for suffix, count in counts.items()},
    }


@pytest.mark.parametrize(
    ("outputs", "known"),
    [
        ({"elsewhere/x_text_document": 65_536}, True),
        ({"elsewhere/y_text_document": 65_536}, True),  # renamed since
        ({"elsewhere/x_text_document": 32_768}, False),
        ({"elsewhere/x_text_document": 65_536, "elsewhere/y_text_document": 65_536}, True),
        ({"elsewhere/x_text_document": 32_768, "elsewhere/y_text_document": 65_536}, True),
        ({"elsewhere/y_text_document": 65_536, "elsewhere/z_text_document": 65_536}, False),  # which of the two
        ({"a/x_text_document": 65_536, "b/x_text_document": 65_536}, False),
    ],
)
def test_a_manifest_of_several_pairs_speaks_of_one_of_them(prefix: str, outputs: dict[str, int], known: bool) -> None:
    """Of the one of its size; of several of them that of its name."""
    content = {
        "tokenizer": {},
        "outputs": {name: {"token_bytes": size} for name, size in outputs.items()},
        "checksums": {name: _entry(65_536) for name in outputs},
    }
    Path(f"{prefix}_manifest.json").write_text(json.dumps(content))
    assert len(known_blocks(prefix)) == (64 + 21 if known else 0)


def test_the_next_manifest_is_asked_where_the_first_says_nothing(prefix: str) -> None:
    _write_manifest(prefix, {"other": _entry(65_536)})
    short = prefix.removesuffix("_text_document")
    Path(f"{short}_manifest.json").write_text(
        json.dumps(
            {
                "tokenizer": {},
                "outputs": {"m": {"token_bytes": 65_536}},
                "checksums": {"m": _entry(65_536)},
            }
        )
    )
    assert [block.crc32 for block in known_blocks(prefix)[:3]] == ["00000000", "00000001", "00000002"]


@pytest.mark.parametrize("more", [-1, 1])
def test_a_manifest_with_another_number_of_checksums_says_nothing(prefix: str, more: int) -> None:
    found = checksums([prefix], 1024)
    values = found[prefix]["crc32"]
    for suffix in (".bin", ".idx"):
        values[suffix] = [*values[suffix], "00000000"][: len(values[suffix]) + more]
    _write_manifest(prefix, found)
    assert known_blocks(prefix) == []


@pytest.mark.parametrize(("size", "known"), [(1 << 9, False), (1 << 10, True), (1 << 30, True), (1 << 31, False)])
def test_blocks_have_a_kilobyte_at_least_and_a_gigabyte_at_most(prefix: str, size: int, known: bool) -> None:
    _write_manifest(prefix, checksums([prefix], size))
    assert bool(known_blocks(prefix)) == known


def test_a_damaged_file_that_is_replaced_while_it_is_looked_at_is_left_out(prefix: str) -> None:
    path = Path(f"{prefix}.bin")
    blocks = [block for block in known_blocks(prefix) if block.path == str(path)]
    with path.open("r+b") as file:
        file.write(b"\xff")

    def pause(seconds: float) -> bool:
        path.with_suffix(".new").write_bytes(bytes(1 << 16))
        path.with_suffix(".new").rename(path)
        return True

    check = BackgroundCheck(blocks, pause)
    check._thread.join(20)
    check.check()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), FileNotFoundError(2, "gone")])
def test_a_block_that_cannot_be_read_just_now_is_no_damage(
    prefix: str, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = known_blocks(prefix)

    def pread(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(os, "pread", pread)
    check = BackgroundCheck(blocks, lambda seconds: True)
    check._thread.join(20)
    check.check()
    assert check.checked == len(blocks)
    found = damage(blocks[0])
    assert found == f"{prefix}.bin cannot be read: {error.strerror}"


def test_a_check_that_is_closed_ends_at_once(prefix: str) -> None:
    """Also between two pieces that need no rest."""
    began, go_on = threading.Event(), threading.Event()

    def pause(seconds: float) -> bool:
        began.set()
        return go_on.wait(20)

    check = BackgroundCheck(known_blocks(prefix), pause)
    assert began.wait(20)
    threading.Timer(0.05, go_on.set).start()
    check.close()
    assert not check._thread.is_alive()
    assert check.checked == 0


def test_checksums_that_are_read_in_pieces_are_those_of_whole_blocks(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_PIECE", 100)
    whole = Path(f"{prefix}.bin").read_bytes()
    blocks = [f"{zlib.crc32(whole[first : first + 1024]):08x}" for first in range(0, len(whole), 1024)]
    assert checksums([prefix], 1024)[prefix]["crc32"][".bin"] == blocks
