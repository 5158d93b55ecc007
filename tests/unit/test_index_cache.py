"""Index files appear whole or not at all, and are used only for what they were made from."""

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.index_cache import load_or_build

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
