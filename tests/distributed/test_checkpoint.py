"""What lies in a checkpoint folder, and what happens when something in it is missing, torn or in the way."""

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint.native import save
from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, find_latest, iteration_folder, saved_iterations
from megatron_ext.checkpoint.native.load_checkpoint import _reason
from megatron_ext.errors import DataError
from megatron_ext.verify.ranks import RankError, run_ranks
from tests.support import checkpoints
from tests.support.checkpoints import build, file_hashes, load, save_at, train

FLAGS = [*checkpoints.FLAGS, "--num-layers", "1"]


def _kill_at(call: str, folder: str, iterations: list[int], flags: list[str]) -> None:
    """Save, and be killed at the first `call` of os that the last of the saves makes."""
    run = build(flags)
    for iteration in iterations:
        train(run, iteration - run.state.iteration)
        if iteration == iterations[-1]:
            setattr(os, call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        save.save_checkpoint(run, folder)


def test_folder_has_megatrons_names_and_the_configuration(tmp_path: Path) -> None:
    helpers = run_ranks(2, save_at, str(tmp_path), [1, 2], FLAGS)
    assert helpers == [0, 0], "a save that is waited for starts no process"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000002", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "2"
    names = {path.name for path in (tmp_path / "iter_0000002").iterdir()}
    written = {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"}
    assert names == {*written, "config.yaml", "manifest.json", "versions.json"}
    config = yaml.safe_load((tmp_path / "iter_0000002" / "config.yaml").read_text())
    assert config["hidden_size"] == 32


def test_a_folder_without_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert run_ranks(1, load, str(folder), FLAGS) == [(None, 0)]


@pytest.mark.parametrize("tracker", [b"", b"2\n\x00garbage", b"\xff\xfe", b"-1", b"7", b"release", None])
def test_newest_checkpoint_stands_in_for_a_bad_tracker(tracker: bytes | None, tmp_path: Path) -> None:
    """Empty, torn, not text, or naming what is not there."""
    for iteration in (1, 2):
        folder = iteration_folder(tmp_path, iteration)
        folder.mkdir()
        (folder / ".metadata").touch()
        (folder / "metadata.json").touch()
    (tmp_path / ".iter_0000003.partial").mkdir()
    iteration_folder(tmp_path, 4).mkdir()  # without the files that are written last
    if tracker is not None:
        (tmp_path / TRACKER).write_bytes(tracker)
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.path, found.iteration) == (tmp_path / "iter_0000002", 2)
    assert found.warning is not None
    assert "iter_0000002" in found.warning


def test_a_tracker_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("5")
    with pytest.raises(DataError, match="names iteration 5, which is missing"):
        find_latest(tmp_path)


# replace: the tracker is not yet set; rename: the folder has no final name; fsync: the shards are being written.
@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_killed_in_a_save(call: str, tmp_path: Path) -> None:
    """Between shards, manifest and tracker."""
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(1, _kill_at, call, str(tmp_path), [1, 3], FLAGS)
    saved = saved_iterations(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "1"
    assert saved == ([1, 3] if call == "replace" else [1])
    before = file_hashes(tmp_path / "iter_0000001")
    assert run_ranks(1, load, str(tmp_path), FLAGS) == [(1, 1)]
    run_ranks(1, save_at, str(tmp_path), [2], FLAGS)
    assert file_hashes(tmp_path / "iter_0000001") == before
    assert saved_iterations(tmp_path) == sorted({*saved, 2})
    assert not list(tmp_path.glob(".*")), "what the killed save left is removed"
    assert run_ranks(1, load, str(tmp_path), FLAGS) == [(2, 2)]


def test_a_checkpoint_of_the_same_iteration_is_replaced(tmp_path: Path) -> None:
    run_ranks(1, save_at, str(tmp_path), [1], [*FLAGS, "--seed", "1"])
    first = file_hashes(tmp_path / "iter_0000001")
    run_ranks(1, save_at, str(tmp_path), [1], [*FLAGS, "--seed", "2"])
    assert file_hashes(tmp_path / "iter_0000001") != first
    assert run_ranks(1, load, str(tmp_path), FLAGS) == [(1, 1)]


def test_every_rank_says_that_saving_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RankError) as caught:
        run_ranks(2, save_at, str(tmp_path / "file"), [1], FLAGS)
    for _, text in caught.value.tracebacks:
        assert "StorageError: cannot save a checkpoint" in text
    assert len(caught.value.tracebacks) == 2


def test_the_reason_is_one_line_of_the_engines_own() -> None:
    asked = "WeightsUnpickler error: Unsupported global: GLOBAL os.system was not an allowed global by default"
    refused = pickle.UnpicklingError(
        "Weights only load failed. Re-running `torch.load` with `weights_only` set to `False` will run code.\n"
        f"{asked}. Please use `torch.serialization.add_safe_globals`\nto allowlist it."
    )
    assert _reason(refused) == f"UnpicklingError: {asked}"
    of_ranks: Any = {1: (ValueError("too short\nsecond line"), None)}
    assert _reason(CheckpointException("read", of_ranks)) == "ValueError: too short"
    assert _reason(EOFError()) == "EOFError: EOFError"


@pytest.mark.parametrize("damage", ["another model", "truncated shard", "missing shard", "garbage metadata"])
def test_what_cannot_be_loaded_is_named(damage: str, tmp_path: Path) -> None:
    """Where no manifest tells of the damage, the engine does."""
    run_ranks(1, save_at, str(tmp_path), [1], FLAGS)
    flags = [*FLAGS, "--hidden-size", "64"] if damage == "another model" else FLAGS
    checkpoint = tmp_path / "iter_0000001"
    (checkpoint / "manifest.json").unlink()
    shard = checkpoint / "__0_0.distcp"
    match damage:
        case "truncated shard":
            shard.write_bytes(shard.read_bytes()[:2000])
        case "missing shard":
            shard.unlink()
        case "garbage metadata":
            (checkpoint / ".metadata").write_bytes(b"garbage")
    with pytest.raises(RankError, match=r"DataError: the checkpoint \S*iter_0000001 cannot be read"):
        run_ranks(1, load, str(tmp_path), flags)
