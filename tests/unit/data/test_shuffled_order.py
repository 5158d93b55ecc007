"""Index files appear whole or not at all, and are used only for what they were made from."""

import contextlib
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.shuffled_order import StoredSequences, _in_memory, cache_folder, load_or_build

ARRAYS = np.arange(5), np.arange(12).reshape(6, 2)


def load(folder: Path, description: str = "of this", build=lambda: ARRAYS) -> list[np.ndarray]:
    return load_or_build(folder, "stem", ("one", "two"), description, build)


def never() -> tuple[np.ndarray, ...]:
    raise AssertionError("built again")


def test_built_once_then_mapped(tmp_path: Path):
    for build in (lambda: ARRAYS, never):
        found = load(tmp_path, build=build)
        assert [array.tolist() for array in found] == [array.tolist() for array in ARRAYS]
        # Mapped, and plain: an index into a np.memmap is a call of Python.
        assert all(type(array) is np.ndarray and isinstance(array.base, np.memmap) for array in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stem-description.txt", "stem-one.npy", "stem-two.npy"]


@pytest.mark.parametrize("name", ["stem-description.txt", "stem-one.npy", "stem-two.npy"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_a_cache_that_is_not_whole_is_built_again(tmp_path: Path, name: str, damage: str):
    load(tmp_path)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else -3])
    assert [array.tolist() for array in load(tmp_path)] == [array.tolist() for array in ARRAYS]
    load(tmp_path, build=never)


def test_a_pipe_in_the_place_of_the_description_is_replaced(tmp_path: Path):
    os.mkfifo(tmp_path / "stem-description.txt")
    load(tmp_path)
    load(tmp_path, build=never)


def test_other_input_under_the_same_hash_is_not_used(tmp_path: Path):
    load(tmp_path)
    assert load(tmp_path, "of that", lambda: (ARRAYS[0] + 1, ARRAYS[1]))[0].tolist() == [1, 2, 3, 4, 5]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    with pytest.raises(AssertionError):
        load(tmp_path, build=never)
    unwritable = np.array([lambda: None])  # an object array, which takes a pickle
    with pytest.raises(ValueError, match="allow_pickle"):
        load(tmp_path, build=lambda: (ARRAYS[0], unwritable))
    assert [path.name for path in tmp_path.iterdir()] == ["stem-one.npy"]


def test_no_pickle_is_read(tmp_path: Path):
    load(tmp_path)
    np.save(tmp_path / "stem-one.npy", np.array([never]), allow_pickle=True)
    assert load(tmp_path)[0].tolist() == ARRAYS[0].tolist()


@pytest.mark.parametrize(
    ("flag", "prefix", "expected"),
    [
        (None, "data/corpus", "data/corpus/cache/GPTDataset_indices"),
        ("", "data/corpus", "data/corpus/cache/GPTDataset_indices"),
        ("cache", "data/corpus", "cache"),
        (None, "s3://bucket/corpus", "machine/megatron_ext/GPTDataset_indices"),
        ("cache", "s3://bucket/corpus", "cache"),
    ],
)
def test_where_the_index_is_kept(flag: str | None, prefix: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "machine")
    assert cache_folder(flag, prefix) == Path(expected)


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_variable_a_machines_folder_is_below_the_home(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder(None, "s3://bucket/corpus") == Path("/home/somebody/.cache/megatron_ext/GPTDataset_indices")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sequences_of_a_store_are_read_as_megatron_core_reads_them(tmp_path: Path, dtype: Any) -> None:
    prefix = str(tmp_path / "data")
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_tokens(np.arange(12, dtype=dtype).tobytes(), [5, 0, 4, 3])
    ours, core = StoredSequences(prefix), IndexedDataset(prefix)
    assert len(ours) == len(core) == 3
    assert ours.sequence_lengths.tolist() == core.sequence_lengths.tolist() == [5, 4, 3]
    for number, (offset, length) in itertools.product(range(3), ((0, None), (2, None), (1, 2), (2, 0), (0, 3))):
        found = ours.get(number, offset, length)
        assert found.tolist() == np.asarray(core.get(number, offset, length)).tolist()


def _built_in_memory(build: Any) -> tuple[Any, list[Any]]:
    config = SimpleNamespace(path_to_cache="cache", mock=False)
    dataset, seen = SimpleNamespace(config=config), []

    def wrapped() -> Any:
        seen.append((dataset.config.path_to_cache, dataset.config.mock))
        return build()

    with contextlib.suppress(KeyError):
        assert _in_memory(dataset, wrapped) == "arrays"
    assert dataset.config is config
    return config, seen


@pytest.mark.parametrize("fails", [False, True])
def test_megatron_cores_own_build_writes_nothing(fails: bool) -> None:
    """It writes no file of its own for a mock dataset without a folder; the dataset's configuration stays as it is."""

    def build() -> str:
        if fails:
            raise KeyError
        return "arrays"

    config, seen = _built_in_memory(build)
    assert seen == [(None, True)]
    assert vars(config) == {"path_to_cache": "cache", "mock": False}
