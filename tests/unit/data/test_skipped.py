"""--skip-samples: what its words and files name, and what they cannot be."""

import contextlib
import os
from pathlib import Path

import pytest

from megatron_ext.data import skipped
from megatron_ext.data.skipped import NOTHING, skipped_samples


def test_numbers_ranges_and_files_are_joined(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"sample": 40, "text": "x"}\n{"sample": 3}\n\n41-43\n')
    skipped = skipped_samples(["7", "1-2", "4-6", "20-29", "25-30", "22-23", str(file)])
    assert skipped.ranges == (range(1, 8), range(20, 31), range(40, 44))
    assert [sample for sample in range(50) if sample in skipped] == [*range(1, 8), *range(20, 31), *range(40, 44)]


def test_a_batch_is_covered_only_if_all_of_it_is() -> None:
    skipped = skipped_samples(["8-15", "20"])
    covered = [skipped.covers(range(first, first + 4)) for first in range(4, 14)]
    assert covered == [False] * 4 + [True] * 5 + [False]
    assert not skipped.covers(range(17, 21))
    assert not skipped.covers(range(15, 21)), "its ends are left out, and what lies between is not"
    assert not NOTHING.covers(range(0, 1))
    assert 0 not in NOTHING


@pytest.mark.parametrize(
    "word", ["nine", "7-", "-7", "9-7", "1" * 17, "1.5", "", "999999999999999-9999999999999999", "٣"]
)
def test_a_word_that_is_no_sample_is_named(word: str) -> None:
    with pytest.raises(ValueError, match=r"no sample's number|no range of samples"):
        skipped_samples(["3", word])


@pytest.mark.parametrize("line", ["{}", '{"sample": "x"}', '{"sample": -1}', "[1]", "{" * 100_000, "\xff", "1;2"])
def test_a_bad_line_is_named_with_its_file(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad"
    file.write_bytes(b"5\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"bad:2: "):
        skipped_samples([str(file)])


def test_endless_and_huge_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "lines").write_bytes(b"\n" * 1_000_001)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    for name in ("fifo", "lines", "large"):
        with pytest.raises(ValueError, match=r"regular file|lines|bytes"):
            skipped_samples([str(tmp_path / name)])
    with pytest.raises(ValueError, match="regular file"):
        skipped_samples(["/dev/zero"])


def test_a_name_of_digits_is_a_number_also_where_a_file_has_it(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        Path("17").write_text("99\n")
        Path("17-18").write_text("99\n")
        assert skipped_samples(["17"]).ranges == (range(17, 18),)
        assert skipped_samples(["17-18"]).ranges == (range(99, 100),)


def test_neighbouring_ranges_are_one_and_a_batch_over_two_is_not_covered() -> None:
    joined = skipped_samples(["4-5", "6-7", "9"])
    assert joined.ranges == (range(4, 8), range(9, 10))
    assert joined.covers(range(5, 7))
    assert not joined.covers(range(7, 10)), "8 is trained on"
    assert not joined.covers(range(2, 6))
    assert skipped_samples(["2-20", "3-4", "5"]).ranges == (range(2, 21),)


@pytest.mark.parametrize(("word", "taken"), [("1000000000000000", True), ("1000000000000001", False), ("7-7", True)])
def test_the_largest_sample(word: str, taken: bool) -> None:
    if taken:
        first = int(word.split("-")[0])
        assert skipped_samples([word]).ranges == (range(first, first + 1),)
        return
    with pytest.raises(ValueError, match=f"^{word} is no range of samples"):
        skipped_samples([word])


def test_a_file_of_as_many_lines_as_may_be_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped, "_LINES", 3)
    (tmp_path / "file").write_text("1\n3\n5\n")
    assert skipped_samples([str(tmp_path / "file")]).ranges == (range(1, 2), range(3, 4), range(5, 6))
    (tmp_path / "file").write_text("1\n3\n5\n7\n")
    with pytest.raises(ValueError, match="has more than 3 lines"):
        skipped_samples([str(tmp_path / "file")])
