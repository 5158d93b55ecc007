"""Data that BigScience's scripts name by part, weight and range."""

from pathlib import Path

import pytest

from megatron_ext.foreign.megatron_deepspeed import read


def test_whole_prefixes_are_the_data_of_their_part(tmp_path: Path) -> None:
    file = tmp_path / "valid.txt"
    file.write_text('"valid: 1.0 0:1 v"\n')
    train = ["--train-weighted-split-paths", "train: 0.3 0:1 a, 0.7 0.0:1.0 b"]
    typed = read([*train, "--valid_weighted_split_paths_path", str(file)])
    assert typed.values == {"train_data_path": ("0.3", "a", "0.7", "b"), "valid_data_path": ("1.0", "v")}
    assert not typed.problems


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train: 1 0:0.9 a"], "a has 0:0.9, not the whole, 0:1; use --data-path with --split"),
        (["train: 1 0:1 a", "other: 1 0:1 b"], "2 words, but expected one"),
        (["1 0:1 a"], 'expected one, "NAME: WEIGHT BEGIN:END PREFIX, ..."'),
        (["train: 1 a"], 'expected one, "NAME: WEIGHT BEGIN:END PREFIX, ..."'),
        ([], "0 words, but expected one"),
    ],
)
def test_other_words_are_refused_with_the_reason(words: list[str], said: str) -> None:
    [problem] = read(["--train-weighted-split-paths", *words]).problems
    assert problem.startswith("--train-weighted-split-paths: ")
    assert said in problem


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "open.txt").write_text('"train: 1 0:1 a')
    for name, said in (("none.txt", "No such file"), ("open.txt", "No closing quotation"), ("", "no regular file")):
        [problem] = read(["--test-weighted-split-paths-path", str(tmp_path / name)]).problems
        assert problem.startswith(f"--test-weighted-split-paths-path {tmp_path / name}: ")
        assert said in problem


def test_a_dry_run_does_without_the_file() -> None:
    words = ["--train-weighted-split-paths-path", "/nowhere/train.txt"]
    typed = read([*words, "--dry-run"])
    assert not typed.problems
    assert "/nowhere/train.txt does not exist; a run needs it" in typed.warnings[0]
    assert "No such file" in read(words).problems[0]
