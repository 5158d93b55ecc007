"""Files that list data stand for the flags that name it, and what is wrong with them is said with the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse import data_lists
from megatron_ext.config.parse.arguments import parse, read
from megatron_ext.errors import ConfigurationError
from megatron_ext.train.configure import configure

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --train-iters 5"
OTHERS = "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 100 --device cpu"
FLAGS = [*MODEL.split(), *OTHERS.split()]


def listed(folder: Path, content: Any) -> str:
    path = folder / "data.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_words_of_a_file_stand_for_the_data_path(tmp_path: Path) -> None:
    path = listed(tmp_path, "0.3 /a/b\n0.7\t/c\n")
    assert parse(["--data-args-path", path]).values == {"data_path": ("0.3", "/a/b", "0.7", "/c")}


def test_a_list_for_each_part_stands_for_their_flags(tmp_path: Path) -> None:
    path = listed(tmp_path, {"train": [0.25, "a", 1, "b"], "valid": "2 c 3 d", "test": None})
    assert parse(["--per-split-data-args-path", path]).values == {
        "train_data_path": ("0.25", "a", "1", "b"),
        "valid_data_path": ("2", "c", "3", "d"),
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting property name"),
        ([1], "expected an object with train, valid and test"),
        ({"valid": ["a"]}, "expected an object with train, valid and test"),
        ({"train": ["a"], "validation": ["b"]}, "expected an object with train, valid and test"),
        ({"train": [["a"]]}, "train is not a list of prefixes, or of weights and prefixes in turn"),
        ({"train": ["a", ["b"]]}, "train is not a list of prefixes"),
        ({"train": {"a": 1}}, "train is not a list of prefixes"),
    ],
)
def test_a_file_that_lists_nothing_is_named_with_the_other_problems(content: Any, why: str, tmp_path: Path) -> None:
    path = listed(tmp_path, content)
    unknown, problem = read(["--per-split-data-args-path", path, "--nonsense"]).problems
    assert "--nonsense" in unknown
    assert problem.startswith(f"--per-split-data-args-path {path} cannot be read: {why}")


def test_a_list_and_a_flag_do_not_name_the_same_data(tmp_path: Path) -> None:
    path = listed(tmp_path, "a b c")
    with pytest.raises(ConfigurationError, match=r"--data-args-path .* and --data-path name the same data; keep one"):
        parse(["--data-args-path", path, "--data-path", "d"])


def test_parts_without_data_are_left_out(tmp_path: Path) -> None:
    path = listed(tmp_path, {"train": ["a"], "valid": [], "test": ""})
    assert parse(["--per-split-data-args-path", path]).values == {"train_data_path": ("a",)}


def test_a_file_that_is_no_text_or_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"/a\xff/b")
    with pytest.raises(ConfigurationError, match=r"--data-args-path \S+/data.txt cannot be read: 'utf-8' codec"):
        parse(["--data-args-path", str(path)])
    path.write_text("/a/b")
    monkeypatch.setattr(data_lists, "_MOST_BYTES", 3)
    with pytest.raises(ConfigurationError, match=r"--data-args-path \S+/data.txt cannot be read"):
        parse(["--data-args-path", str(path)])


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: it is no regular file"):
        parse(["--data-args-path", str(tmp_path)])
    with pytest.raises(ConfigurationError, match="/proc/self/mem cannot be read: Input/output error"):
        parse(["--data-args-path", "/proc/self/mem"])  # fails as a broken disk does


def test_a_file_that_is_not_there_is_refused_and_believed_by_a_dry_run() -> None:
    flags = [*FLAGS, "--per-split-data-args-path", "/nowhere/blend.json"]
    with pytest.raises(ConfigurationError) as refused:
        configure(flags)
    assert refused.value.problems == ["--per-split-data-args-path: /nowhere/blend.json does not exist; check the path"]
    [warning] = configure([*flags, "--dry-run"], believing=True).typed.warnings
    assert warning.endswith("does not have: the files of --per-split-data-args-path")


def test_the_configuration_of_a_run_names_the_data_itself(tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"a.{suffix}").touch()
    path = listed(tmp_path, {"train": [str(tmp_path / "a")], "valid": [str(tmp_path / "a")]})
    data = configure([*FLAGS, "--per-split-data-args-path", path]).config.data
    assert data.train_data_path == data.valid_data_path == (str(tmp_path / "a"),)
    assert data.per_split_data_args_path is None
