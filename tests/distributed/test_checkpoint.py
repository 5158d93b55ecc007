"""What lies in a checkpoint folder, and what happens when something in it is missing, torn or in the way."""

import logging.handlers
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint.native import save
from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, saved_iterations
from megatron_ext.checkpoint.native.load_checkpoint import _reason
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.errors import StorageError
from megatron_ext.forkserver.ranks import RankError, run_ranks
from tests.support import checkpoints
from tests.support.checkpoints import build, file_hashes, flip, load, save_at, train
from tests.support.program import run_program

FLAGS = [*checkpoints.FLAGS, "--num-layers", "1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of iteration 1, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(1, save_at, str(folder), [1], FLAGS)
    return folder


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
        assert "SaveFailedError: cannot save a checkpoint" in text
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
def test_what_cannot_be_loaded_is_named(damage: str, whole: Path, tmp_path: Path) -> None:
    """Where no manifest tells of the damage, the engine does."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    flags = [*FLAGS, "--hidden-size", "64"] if damage == "another model" else FLAGS
    checkpoint = tmp_path / "iter_0000001"
    for name in ("manifest.json", "versions.json"):
        (checkpoint / name).unlink()
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


POINTS = 50


def _save_and_die(folder: str, seconds: float | None) -> float:
    """Save at step 2; the kernel ends the process that long after the save has begun, in Python or in a system call."""
    run = build(FLAGS)
    train(run, 2)
    if seconds is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process as SIGKILL does
        signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.perf_counter()
    save_checkpoint(run, folder)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return time.perf_counter() - started


# Slow: 50 kills; test_killed_in_a_save kills at each point between shards and tracker.
@pytest.mark.slow
def test_50_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [duration] = run_ranks(1, _save_and_die, str(tmp_path / "whole"), None)
    run_ranks(1, save_at, str(tmp_path / "save"), [1], FLAGS)
    before = file_hashes(tmp_path / "save" / "iter_0000001")
    loaded, killed = [], 0
    for point in range(POINTS):
        try:
            [taken] = run_ranks(1, _save_and_die, str(tmp_path / "save"), duration * (point + 1) / POINTS)
            duration = min(duration, taken)  # the first one may have been measured on a busier machine
        except RankError as error:
            if "exit code -14" not in str(error):
                raise
            killed += 1
        assert file_hashes(tmp_path / "save" / "iter_0000001") == before
        [(iteration, _)] = run_ranks(1, load, str(tmp_path / "save"), FLAGS)
        assert iteration in saved_iterations(tmp_path / "save")
        if iteration == 2:  # the name came before the end: begin again from one checkpoint
            # The metadata names the save; the tensors are the same.
            shards = [(tmp_path / run / "iter_0000002" / "__0_0.distcp").read_bytes() for run in ("save", "whole")]
            assert shards[0] == shards[1]
            (tmp_path / "save" / "iter_0000002").rename(tmp_path / f"done{point}")
            (tmp_path / "save" / TRACKER).write_text("1")
        loaded.append(iteration)
    with capsys.disabled():
        print(f"\n{killed} kills in {duration:.3f} s: {loaded.count(1)} loaded the old one, {loaded.count(2)} the new")
    assert killed > POINTS / 2
    assert loaded.count(1) > 0


def _save_with_a_bad_disk(folder: str, iterations: list[int], flags: list[str]) -> None:
    """Save; the disk turns a byte of the last checkpoint as soon as it is written."""
    genuine = save.publish

    def publish(folder: str, iteration: int) -> Path:
        path = genuine(folder, iteration)
        if iteration == iterations[-1]:
            flip(path / "__0_0.distcp")
        return path

    save.publish = publish
    save_at(folder, iterations, flags)


def test_the_last_valid_one_is_never_removed(tmp_path: Path) -> None:
    flags = [*FLAGS, "--save", "x", "--keep-last-checkpoints", "1"]
    run_ranks(2, _save_with_a_bad_disk, str(tmp_path), [1, 2, 3], flags)
    assert saved_iterations(tmp_path) == [2, 3]
    assert run_ranks(1, load, str(tmp_path), flags) == [(2, 2)]


def test_links_are_left_alone(whole: Path, tmp_path: Path) -> None:
    save, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    shutil.copytree(whole, save)
    (save / "iter_0000001").rename(elsewhere)
    (save / "iter_0000001").symlink_to(elsewhere)
    run_ranks(1, save_at, str(save), [2, 3], [*FLAGS, "--save", "x", "--save-retain-interval", "3"])
    assert saved_iterations(save) == [1, 3]
    assert (elsewhere / "manifest.json").exists()


PROGRAM = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data
    --vocab-size 61 --micro-batch-size 1 --lr 1e-2 --eval-interval 0 --train-iters 5 --save-interval 1
""")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB in memory: room for two checkpoints of the program below."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def _full_on_the_last_rank(folder: str) -> tuple[str, list[str]]:
    """Save where no file of the last rank may grow beyond 1 kB: past the check of the free space, in a write. Return
    the error, and what the engine logs of it."""
    run = build([*FLAGS, "--use-distributed-optimizer"])
    run.state.iteration = 2
    if run.rank == run.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    records = logging.handlers.BufferingHandler(1000)
    logging.getLogger("megatron.core").addHandler(records)
    with pytest.raises(StorageError) as raised:
        save.save_checkpoint(run, folder)
    return str(raised.value), [record.getMessage() for record in records.buffer if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_disk_that_is_full_on_one_rank_fails_the_save_of_all_and_leaves_nothing(
    ranks: int, has_earlier: bool, whole: Path, tmp_path: Path
) -> None:
    if has_earlier:
        shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = file_hashes(tmp_path)
    file = tmp_path / f".iter_0000002.partial/__{ranks - 1}_[01].distcp"
    for said, logged in run_ranks(ranks, _full_on_the_last_rank, str(tmp_path)):
        assert re.match(rf"cannot save a checkpoint to {tmp_path}: File too large: {file}\. ", said), said
        assert ("Earlier checkpoints there are whole" in said) == has_earlier
        assert logged == []
    assert file_hashes(tmp_path) == before
    assert not list(tmp_path.glob(".iter*"))
    assert run_ranks(1, load, str(tmp_path), FLAGS) == [(1, 1) if has_earlier else (None, 0)]


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    save = small_disk / "save"
    flags = [*PROGRAM, "--save", str(save), "--metrics-file", str(tmp_path / "metrics.jsonl")]
    [ended] = run_ranks(1, run_program, flags)
    assert ended.code == 74, ended.errors
    said = ended.errors.splitlines()[-1]
    assert "No space left on device" in said
    assert "bytes are needed" in said
    assert saved_iterations(save) == [1, 2]
    assert not list(save.glob(".iter*"))
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
