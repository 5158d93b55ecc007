"""Which of the checkpoints in a folder are tried, in which order, and what is said of a tracker that is wrong."""

import itertools
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native import checkpoint_folder as places
from megatron_ext.checkpoint.native.checkpoint_folder import (
    TRACKER,
    SavedCheckpoint,
    find_all,
    find_to_load,
    iteration_folder,
)
from megatron_ext.errors import DataError

# Numbers whose names begin alike, whose order as text is another one, and the first that needs eight digits.
STEPS = (0, 1, 10, 200000, 10000000)
# None of these is a checkpoint of ours, whatever lies in it.
OTHERS = ("iter_00000003", "iter_3", "iter_0000010.old", ".iter_0000020.partial", "xiter_0000030", "iter_0000040x")
OTHERS += ("iter_000000\u0663", "iter_0000005.old")


def _fill(path: Path, *names: str) -> None:
    path.mkdir(parents=True)
    for name in names:
        (path / name).touch()


def _half_ones(folder: Path) -> None:
    """Make what looks like a checkpoint and is none."""
    for name in OTHERS:
        _fill(folder / name, ".metadata", "metadata.json")
    _fill(folder / "iter_0000050", ".metadata")
    _fill(folder / "iter_0000060", "metadata.json")
    _fill(folder / "iter_0000070", "mp_rank_00")
    (folder / "iter_0000080").touch()


NEWEST = [10000000, 200000, 10, 1, 0]


@pytest.mark.parametrize(
    ("tracker", "tried", "said"),
    [
        ("10\n", [10, 10000000, 200000, 1, 0], None),
        ("0", [0, 10000000, 200000, 10, 1], None),
        ("10000000", NEWEST, None),
        ("release", [0], None),
        (None, NEWEST, "is missing"),
        ("", NEWEST, "holds '' instead of an iteration"),
        ("\udcff\udcfe", NEWEST, "holds '\ufffd\ufffd' instead of an iteration"),
        ("iter_0000001", NEWEST, "holds 'iter_0000001' instead of an iteration"),
        ("2", NEWEST, "names iteration 2, which is missing or not whole"),
        ("20", NEWEST, "names iteration 20, which is missing or not whole"),
        ("50", NEWEST, "names iteration 50, which is missing or not whole"),
        (
            "70",
            NEWEST,
            "names iteration 70, which is missing or not whole (it is in Megatron-LM's legacy format: a free pickle, "
            "which is not read)",
        ),
    ],
)
def test_the_tracker_names_the_first_and_the_newest_follow(
    tracker: str | None, tried: list[int], said: str | None, tmp_path: Path
) -> None:
    _half_ones(tmp_path)
    for step in STEPS:
        _fill(iteration_folder(tmp_path, step), ".metadata", "metadata.json")
    _fill(tmp_path / "release", ".metadata", "metadata.json")
    if tracker is not None:
        (tmp_path / TRACKER).write_bytes(tracker.encode(errors="surrogateescape"))
    assert places.saved_iterations(tmp_path) == sorted(STEPS)
    found = find_all(tmp_path)
    if tracker == "release":
        assert found == [SavedCheckpoint(tmp_path / "release", 0)]
        return
    newest = iteration_folder(tmp_path, 10000000)
    warning = f"{tmp_path / TRACKER} {said}; using the newest whole checkpoint, {newest}" if said else None
    expected = [SavedCheckpoint(iteration_folder(tmp_path, step), step) for step in tried]
    assert found == [SavedCheckpoint(expected[0].path, expected[0].iteration, warning), *expected[1:]]
    assert places.find_latest(tmp_path) == found[0]


@pytest.mark.parametrize("tracker", [None, "10", "release", "x"])
def test_a_folder_without_a_whole_checkpoint_is_empty_or_wrong(tracker: str | None, tmp_path: Path) -> None:
    _half_ones(tmp_path)
    if tracker is None:
        assert find_all(tmp_path) == []
        assert places.find_latest(tmp_path) is None
        return
    (tmp_path / TRACKER).write_text(tracker)
    with pytest.raises(DataError) as caught:
        find_all(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / TRACKER} ")
    assert str(caught.value).endswith(
        f", and there is no whole checkpoint in {tmp_path}. Give the right folder with --load, or remove the file to "
        "start afresh."
    )


def test_a_link_to_a_checkpoint_is_that_checkpoint(tmp_path: Path) -> None:
    path = iteration_folder(tmp_path / "saved", 7)
    _fill(path, ".metadata", "metadata.json")
    (tmp_path / "best").symlink_to(path)
    assert find_to_load(tmp_path / "best") == [SavedCheckpoint(path, 7)]
    assert places.load_problem(str(tmp_path / "best"), None) is None


def test_the_step_that_is_asked_for_is_the_only_one(tmp_path: Path) -> None:
    """Zero is a step, and so is one that begins as another does."""
    _half_ones(tmp_path)
    for step in STEPS:
        _fill(iteration_folder(tmp_path, step), ".metadata", "metadata.json")
    (tmp_path / TRACKER).write_text("10")
    for step in (*STEPS, 2, 3, 20, 50, 60, 70, 80):
        path = iteration_folder(tmp_path, step)
        for load, asked in ((tmp_path, step), (path, None), (path, step)):
            if step in STEPS:
                assert find_to_load(load, asked) == [SavedCheckpoint(path, step)], (load, asked)
                continue
            with pytest.raises(DataError) as caught:
                find_to_load(load, asked)
            assert str(caught.value) == (
                f"{path} is missing or not whole; the whole checkpoints in {tmp_path} are those of: "
                "0, 1, 10, 200000, 10000000."
            )
    assert [found.iteration for found in find_to_load(tmp_path)] == [10, 10000000, 200000, 1, 0]
    for step, other in itertools.product(STEPS, repeat=2):
        named = str(iteration_folder(tmp_path, step))
        said = f"--load {named} names one checkpoint and --ckpt-step {other} another; leave --ckpt-step out"
        assert places.load_problem(named, other) == (None if step == other else said)
        assert places.load_problem(named, None) is places.load_problem(str(tmp_path), other) is None
