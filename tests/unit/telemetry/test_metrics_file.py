"""The metrics file: floats to the last bit, kills in the middle of a row, resuming."""

import json
import math
import resource
import shutil
import struct
from pathlib import Path

import pytest

from megatron_ext.errors import DataError, StorageError
from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.telemetry.metrics_file import MetricsFile
from megatron_ext.untrusted import metrics_rows
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.samples import step

CONTRACT = {
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "elapsed_ms",
    "peak_memory_bytes",
}


def write(path: Path, first: int, last: int, loaded: int = 0) -> None:
    with MetricsFile(path, loaded) as file:
        for iteration in range(first, last + 1):
            file.write(step(iteration=iteration, lm_loss=1.0 / iteration))


def iterations(path: Path) -> list[int]:
    return [row["iteration"] for row in read_rows(path)]


def test_floats_read_back_to_the_same_double(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    values = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, math.pi, math.inf, -math.inf, math.nan]
    with MetricsFile(path, 0) as file:
        for value in values:
            file.write(step(lm_loss=value))
    read = [row["lm_loss"] for row in read_rows(path)]
    assert [struct.pack("d", value) for value in read] == [struct.pack("d", value) for value in values]


def test_rows_hold_the_fields_of_the_contract(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        file.write(step(grad_norm=None))
        file.write(ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=2.5))
    train, validation = read_rows(path)
    assert set(train) >= CONTRACT
    assert train["grad_norm"] is None
    assert validation == {"iteration": 10, "consumed_samples": 160, "validation_loss": 2.5}


def test_each_row_is_in_the_file_before_the_next_step(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write(step(iteration=1))
    assert iterations(path) == [1]
    file.close()


def test_resuming_removes_later_rows_and_keeps_the_others_byte_for_byte(tmp_path: Path):
    straight, resumed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(straight, 1, 8)
    write(resumed, 1, 6)
    write(resumed, 5, 8, loaded=4)
    assert resumed.read_bytes() == straight.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("torn", ['{"iteration": 4, "lm_lo', '{"iteration": 3}', "\x00\x00"])
def test_a_torn_last_line_is_removed(tmp_path: Path, torn: str):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode())
    assert iterations(path) == [1, 2, 3]
    MetricsFile(path, 3).close()
    assert path.read_bytes() == whole


def test_a_fresh_start_empties_the_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 3)
    write(path, 1, 2, loaded=0)
    assert iterations(path) == [1, 2]


def test_a_bad_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A loss of another type is no matter to who trims a file."""
    path = tmp_path / "metrics.jsonl"
    lines = ['{"iteration": 1, "lm_loss": "x"}', '{"iter', "\x00" * 9, '{"iteration": 3}', "x" * (5 << 20)]
    path.write_text("\n".join([*lines, '{"iteration": 4}', '{"iteration": 5']))
    MetricsFile(path, 3).close()
    assert path.read_text() == "\n".join([*lines, ""])
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said] == [f"{path}:{number}" for number in (2, 3, 5)]
    assert "it has more than 4,194,304 bytes" in said[-1]


def test_a_file_that_is_none_of_rows_is_not_touched(tmp_path: Path):
    path = tmp_path / "README.md"
    path.write_text("# A run\n\nthat lasted\nlong")
    with pytest.raises(DataError, match=r"README\.md:1: not a row .* neither is any other line\. Move the file away"):
        MetricsFile(path, 3)
    assert path.read_text() == "# A run\n\nthat lasted\nlong"


@pytest.mark.parametrize("spare", [0, -1])
def test_a_file_may_have_so_many_bytes_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 3)
    monkeypatch.setattr(metrics_rows, "MOST_BYTES", path.stat().st_size + spare)
    if spare:
        with pytest.raises(DataError, match="has more than"):
            iterations(path)
    else:
        assert iterations(path) == [1, 2, 3]
    MetricsFile(path, 3).close()  # a run of any length goes on


def test_a_refused_write_is_a_storage_error(tmp_path: Path):
    """The kernel refuses the write (a limit on file sizes), as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(StorageError, match=r"^cannot write .*metrics\.jsonl: File too large.*--metrics-file"):
            file.write(step())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^cannot open .*file/metrics\.jsonl: .* another place with --save\.$"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl", 0, flag="--save")


def test_a_file_without_later_rows_is_left_as_it_is(tmp_path: Path):
    """The one that another program holds open stays the one of that name."""
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 3)
    before = path.stat().st_ino
    MetricsFile(path, 3).close()
    assert (path.stat().st_ino, iterations(path)) == (before, [1, 2, 3])
    MetricsFile(path, 2).close()
    assert path.stat().st_ino != before
    assert iterations(path) == [1, 2], "the row of the checkpoint stays"


def test_a_file_that_is_removed_meanwhile_is_begun_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "save" / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        file.write(step(iteration=1))
        shutil.rmtree(path.parent)
        file.write(step(iteration=2))
        file.write(step(iteration=3))
    assert iterations(path) == [2, 3]
    assert capsys.readouterr().err.count(f"{path} was removed while this job writes to it") == 1


def test_a_file_that_an_editor_has_replaced_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name stands for another file then, and the open one has none."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        file.write(step(iteration=1))
        shutil.copy(path, tmp_path / "edited")
        (tmp_path / "edited").replace(path)
        file.write(step(iteration=2))
        assert iterations(path) == [1, 2]
    assert capsys.readouterr().err.count("was removed while this job writes to it") == 1


def test_a_file_that_was_renamed_is_written_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        file.write(step(iteration=1))
        path.rename(tmp_path / "renamed.jsonl")
        file.write(step(iteration=2))
    assert iterations(tmp_path / "renamed.jsonl") == [1, 2]
    assert not path.exists()
    assert capsys.readouterr().err == ""


def test_rows_are_strict_json_but_for_nan(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(path.read_text(), parse_constant=refuse)["iteration"] == 1
