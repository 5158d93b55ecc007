"""The folder of --save: one job at a time has it; it is removed, or emptied, in a run or between two."""

import json
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_manifest, lock
from megatron_ext.checkpoint.native.checkpoint_folder import find_latest
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.train.callbacks.checkpointing import Checkpointing
from megatron_ext.train.trainer import Trainer
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.checkpoints import FLAGS as CHECKPOINTED
from tests.support.checkpoints import build
from tests.support.program import Ended, run_program, tiny
from tests.support.save_lock import held

# Of the second tier: tests/distributed/test_checkpoint.py kills ranks in a save.
pytestmark = pytest.mark.full

FLAGS = tiny("--num-layers 1 --hidden-size 16 --global-batch-size 1 --lr-decay-iters 100 --log-interval 1")
SNAPSHOTS = shlex.split("--non-persistent-save-interval 2 --non-persistent-ckpt-type local")


def test_the_second_job_is_refused_and_the_first_can_be_killed(tmp_path: Path) -> None:
    save = tmp_path / "save"
    words = [*FLAGS, "--train-iters", "1", "--save", str(save)]
    with held(save) as holder:
        [refused] = run_ranks(1, run_program, words)
        assert refused.code == 64
        said = f"--save {save} is in use by another job: process {holder.pid} on {socket.gethostname()}, since 20"
        assert said in refused.errors
        assert sorted(path.name for path in save.iterdir()) == [lock.LOCK], "the first job's folder is left alone"
        holder.kill()  # its forked helper lives on
        holder.wait()
        assert run_ranks(1, run_program, words)[0].code == 0
    assert (save / "iter_0000001").is_dir()
    assert json.loads((save / lock.LOCK).read_text())["pid"] != holder.pid


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [ended] = run_ranks(1, run_program, [*FLAGS, "--train-iters", "1", "--save", str(tmp_path / "file" / "save")])
    assert ended.code == 74
    assert "Not a directory. Fix the folder" in ended.errors.splitlines()[-1]


def _run(argv: list[str], step: int, what: str, folder: str) -> Ended:
    """Run; in that step the folder is removed, or the process fails."""
    begin = Trainer.begin_step

    def disturbed(self: Trainer) -> Any:
        if self.run.state.iteration + 1 == step:
            if what == "crash":
                raise RuntimeError("crash")
            shutil.rmtree(folder)
        return begin(self)

    Trainer.begin_step = disturbed
    return run_program(argv)


def test_a_run_goes_on_and_says_what_is_gone(tmp_path: Path) -> None:
    save = tmp_path / "save"
    words = [*FLAGS, "--train-iters", "6", "--save-interval", "2", "--save", str(save)]
    [ended] = run_ranks(1, _run, words, 4, "remove", str(save))
    assert ended.code == 0, ended.errors
    assert f"warning: --save {save} or its .lock was removed while this job is at work there" in ended.errors
    assert f"warning: {save / 'metrics.jsonl'} was removed while this job writes to it" in ended.errors
    assert [row["iteration"] for row in read_rows(save / "metrics.jsonl")] == [4, 5, 6]
    assert {"iter_0000004", "iter_0000006", ".lock"} < {path.name for path in save.iterdir()}
    [resumed] = run_ranks(1, run_program, [*words, "--train-iters", "7", "--load", str(save)])
    assert "resuming at iteration 6 of" in resumed.output


def test_a_removed_folder_that_another_job_has_begun_anew_is_left_to_it(tmp_path: Path) -> None:
    save = tmp_path / "save"
    lock.hold_until_exit(save)
    lock.hold_again(save)
    shutil.rmtree(save)
    with held(save) as other, pytest.raises(ConfigurationError, match=f"by another job: process {other.pid} on"):
        lock.hold_again(save)


def test_snapshots_of_what_an_emptied_folder_held_are_not_used(tmp_path: Path) -> None:
    """Without a checkpoint so far, they follow on none, as a run that is begun anew does."""
    save = tmp_path / "save"
    words = [*FLAGS, *SNAPSHOTS, "--non-persistent-local-ckpt-dir", str(tmp_path / "memory")]
    words += ["--save", str(save), "--load", str(save), "--train-iters", "8"]
    [crashed] = run_ranks(1, _run, words, 6, "crash", "")
    assert crashed.code == 1
    kept = tmp_path / "kept"
    shutil.copytree(save, kept)
    shutil.copytree(tmp_path / "memory", tmp_path / "memory before")
    [resumed] = run_ranks(1, run_program, [*words, "--seed", "6"])
    assert "resuming at iteration 4 of the snapshots" in resumed.output
    assert "--seed 6, but the checkpoint in --load" in resumed.errors, "what a snapshot was taken with counts, too"

    shutil.rmtree(save)
    shutil.rmtree(tmp_path / "memory", ignore_errors=True)
    shutil.copytree(tmp_path / "memory before", tmp_path / "memory")
    [afresh] = run_ranks(1, run_program, words)
    assert (afresh.code, "starting afresh: none in" in afresh.output) == (0, True), afresh.errors
    assert f"it is of a run that was in --save {save} before it was emptied" in afresh.errors


@pytest.mark.slow  # three runs; the test above has the other reason
def test_a_snapshot_follows_on_one_checkpoint_and_not_on_its_number(tmp_path: Path) -> None:
    save = tmp_path / "save"
    words = [*FLAGS, "--save", str(save), "--load", str(save), "--save-interval", "3", "--train-iters", "8"]
    snapshots = [*SNAPSHOTS, "--non-persistent-local-ckpt-dir", str(tmp_path / "memory")]
    [crashed] = run_ranks(1, _run, [*words, *snapshots], 6, "crash", "")
    assert crashed.code == 1
    assert (tmp_path / "memory").is_dir()
    shutil.rmtree(save / "iter_0000003")
    (save / "latest_checkpointed_iteration.txt").unlink()
    other = ["--seed", "6"]
    assert run_ranks(1, run_program, [*words, *other, "--train-iters", "3"])[0].code == 0
    [resumed] = run_ranks(1, run_program, [*words, *snapshots, *other])
    assert f"it follows on another checkpoint than {save / 'iter_0000003'}" in resumed.errors
    assert f"resuming at iteration 3 of {save}" in resumed.output


def _removed_at_every_moment(folder: str, background: bool) -> list[str]:
    """In turn, remove the folder at each operation of a save on what is in it; returns what is wrong afterwards.

    Rank 0 removes it. The save may fail, but the run goes on: the one at the end is whole. (What was whole before it
    was removed is not saved again.)
    """
    run = build([*CHECKPOINTED, "--num-layers", "1", "--train-iters", "500", "--save", folder])
    trainer = Trainer(run, [])
    left, was_whole = [-1], [False]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        names = ("open", "os.mkdir", "os.rename", "os.listdir", "os.scandir", "os.remove", "os.chmod")
        if left[0] < 0 or event not in names or not str(arguments[0]).startswith(folder):
            return
        left[0] -= 1
        if left[0] < 0:
            tracker = Path(folder, "latest_checkpointed_iteration.txt")
            was_whole[0] = tracker.exists() and tracker.read_text() == str(run.state.iteration)
            shutil.rmtree(folder, ignore_errors=True)

    sys.addaudithook(watch)
    wrong, moment = [], 0
    while True:
        if run.rank == 0:
            lock.hold_until_exit(folder)
        torch.distributed.barrier()
        was_whole[0] = False
        saving = Checkpointing(folder, 1, background=background)
        saving.on_start(trainer)
        run.state.iteration += 1  # what is in the checkpoint plays no part
        if run.rank == 0:
            left[0] = moment
        saving.on_step_end(trainer, None)  # pyright: ignore[reportArgumentType]
        over = [left[0] >= 0]
        saving.on_end(trainer)
        left[0] = -1
        found = find_latest(folder)
        files = checkpoint_manifest.read(found.path) if found and found.iteration == run.state.iteration else None
        is_whole = found is not None and files is not None and not checkpoint_manifest.problems(found.path, files)
        if run.rank == 0 and not (is_whole or was_whole[0]):
            wrong.append(f"moment {moment}: {found}")
        torch.distributed.broadcast_object_list(over, src=0)
        if over[0]:
            return [*wrong, f"{moment} moments"]
        moment += 1


@pytest.mark.parametrize("background", [False, True])
def test_a_folder_that_is_removed_at_any_moment_of_a_save_ends_no_run(background: bool, tmp_path: Path) -> None:
    for said in run_ranks(2, _removed_at_every_moment, str(tmp_path / "save"), background):
        assert len(said) == 1, said
        assert said[0].endswith(" moments")


def _lose_a_shard(argv: list[str], save: str) -> Ended:
    """The program, whose folder is removed by rank 0 in its first save, before the shards get their manifest."""
    describe = checkpoint_manifest.describe

    def removed(folder: Path, paths: Any) -> Any:
        checkpoint_manifest.describe = describe
        shutil.rmtree(save)
        return describe(folder, paths)

    checkpoint_manifest.describe = removed
    return run_program(argv)


def test_the_program_warns_that_earlier_checkpoints_may_be_gone_and_goes_on(tmp_path: Path) -> None:
    save = tmp_path / "save"
    words = [*FLAGS, "--train-iters", "4", "--save-interval", "2", "--save", str(save)]
    [ended] = run_ranks(1, _lose_a_shard, words, str(save))
    assert ended.code == 0, ended.errors
    assert f"warning: --save {save} was removed while the checkpoint of iteration 2 was being written" in ended.errors
    assert "earlier ones there may be gone" in ended.errors
    assert "are whole" not in ended.errors
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "4"
