"""The folder of --save is removed, or emptied, while a run is at work there, or between two runs."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import lock
from megatron_ext.errors import ConfigurationError
from megatron_ext.untrusted.metrics_rows import read_rows
from megatron_ext.verify.ranks import run_ranks
from tests.support.program import Ended, run_program
from tests.support.save_lock import held

FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --mock-data
    --vocab-size 61 --make-vocab-size-divisible-by 1 --micro-batch-size 1 --lr 1e-3 --lr-decay-iters 100
    --eval-interval 0 --log-interval 1
""")
SNAPSHOTS = shlex.split("--non-persistent-save-interval 2 --non-persistent-ckpt-type local")


def _run(argv: list[str], step: int, what: str, folder: str) -> Ended:
    """Run; in that step the folder is removed, or the process fails."""
    from megatron_ext.train.trainer import Trainer

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


def test_a_folder_keeps_its_name_until_it_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = tmp_path / "save"
    assert lock.name_of_contents(save) is None

    def begin() -> str | None:
        lock.hold_until_exit(save)
        return lock.name_of_contents(save)

    first = begin()
    (save / "metrics.jsonl").touch()
    assert begin() == first
    (save / "metrics.jsonl").unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert begin() == first, "a restart of a launch that has written nothing yet goes on"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert begin() not in (None, first)


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
