"""--verify-data before the first step: which blocks of which files a rank compares, and what it says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.config.schema import Config, DataConfig
from megatron_ext.data.data_manifest import Block, checksums
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.train import data_check
from tests.support.small_models import small_config

SIZE = 65_536
"""Bytes of the tokens of a pair, in blocks of 1 kB."""


def _as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, local: int, on_machine: int) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, number in zip(names, (rank, ranks, local, on_machine), strict=True):
        monkeypatch.setenv(name, str(number))


def _pair(prefix: Path, *, with_manifest: bool = True) -> str:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens((np.arange(SIZE // 2) % 61).astype(np.uint16).tobytes(), [32] * (SIZE // 64))
    if with_manifest:
        content = {"tokenizer": {}, "outputs": {str(prefix): {"token_bytes": SIZE}}}
        content["checksums"] = checksums([str(prefix)], 1024)
        Path(f"{prefix}_manifest.json").write_text(json.dumps(content))
    return str(prefix)


def _config(verify_data: str, **data: Any) -> Config:
    return dataclasses.replace(small_config(), data=DataConfig(verify_data=verify_data, **data))


def _damage(prefix: str, place: int) -> None:
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(place)
        file.write(b"\xff")


def test_a_file_that_two_splits_name_is_compared_once_and_one_without_checksums_is_named(tmp_path: Path) -> None:
    one, plain = _pair(tmp_path / "one"), _pair(tmp_path / "plain", with_manifest=False)
    config = _config("start", train_data_path=(one, plain), valid_data_path=(one,))
    blocks, without = data_check.blocks_of_run(config)
    assert {block.path for block in blocks} == {f"{one}.bin", f"{one}.idx"}
    assert len({(block.path, block.first) for block in blocks}) == len(blocks)
    assert without == [plain]


@pytest.mark.parametrize("machines", [1, 2, 3])
@pytest.mark.parametrize("on_machine", [1, 2, 3])
def test_the_ranks_of_each_machine_compare_all_of_its_files(
    machines: int, on_machine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block once: machines may have copies of their own."""
    blocks = [Block("x.bin", 1024 * number, 1024, "00000000") for number in range(10)]
    for machine in range(machines):
        compared = []
        for local in range(on_machine):
            _as_rank(monkeypatch, machine * on_machine + local, machines * on_machine, local, on_machine)
            compared += data_check.share(blocks)
        assert sorted(compared, key=lambda block: block.first) == blocks, machine


@pytest.mark.parametrize("place", [0, 3 * 1024 + 6])
@pytest.mark.parametrize(("verify_data", "compares"), [("off", ()), ("background", (0,)), ("start", (0, 3 * 1024 + 6))])
def test_what_is_compared_before_the_first_step(
    verify_data: str, compares: tuple[int, ...], place: int, tmp_path: Path
) -> None:
    """All blocks, or eight from the first to the last."""
    prefix = _pair(tmp_path / "one")
    _damage(prefix, place)
    config = _config(verify_data, train_data_path=(prefix,))
    if place not in compares:
        data_check.check_before_the_first_step(config)
        return
    with pytest.raises(DataError, match=rf"one\.bin: bytes {place // 1024 * 1024} to .* have the checksum .*\. Copy"):
        data_check.check_before_the_first_step(config)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_names_what_has_no_checksums(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _as_rank(monkeypatch, rank, 2, rank, 2)
    prefix = _pair(tmp_path / "plain", with_manifest=False)
    data_check.check_before_the_first_step(_config("start", train_data_path=(prefix,)))
    told = f"--verify-data start: no manifest has checksums of {prefix}, which is not verified"
    assert (told in capsys.readouterr().err) == (rank == 0)
    data_check.check_before_the_first_step(_config("background", train_data_path=(prefix,)))
    assert capsys.readouterr().err == ""
