"""What --load may name: a folder of checkpoints, or one of them. Nothing else makes a run start afresh in silence."""

import shlex
import shutil
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, checkpoint_at
from megatron_ext.errors import DataError
from megatron_ext.verify.ranks import run_ranks
from tests.support.program import Ended, run_program

FLAGS = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 61 --lr 1e-3
    --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --eval-interval 0
"""


def _run(flags: str, ranks: int = 1) -> Ended:
    return run_ranks(ranks, run_program, shlex.split(f"{FLAGS} {flags}"))[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert _run(f"--save {folder} --save-interval 1", 2).code == 0
    (folder / "best").symlink_to("iter_0000002")
    (folder / "copied").symlink_to(folder)
    return folder


@pytest.mark.parametrize("named", ["iter_0000002", "iter_0000002/", "best", "copied/iter_0000002"])
def test_one_checkpoint(named: str, saved: Path) -> None:
    ended = _run(f"--load {saved}/{named} --ckpt-step 2", 2)
    assert ended.code == 0, ended.errors
    assert ended.output.count("checkpoint: resuming at iteration 2 of") == 1
    alone = _run(f"--load {saved}/{named} --exit-on-missing-checkpoint")
    assert "checkpoint: resuming at iteration 2 of" in alone.output


def test_a_release(saved: Path, tmp_path: Path) -> None:
    """Also where the tracker names another one."""
    folder = Path(shutil.copytree(saved, tmp_path / "copy", symlinks=True))
    (folder / "iter_0000001").rename(folder / "release")
    ended = _run(f"--load {folder}/release")
    assert "checkpoint: resuming at iteration 0 of" in ended.output, ended.errors
    assert "checkpoint: resuming at iteration 3 of" in _run(f"--load {folder}").output
    (folder / "release/.metadata").unlink()
    (folder / "release/mp_rank_00").mkdir()
    ended = _run(f"--load {folder}/release")
    assert (ended.code, "Megatron-LM's legacy format" in ended.errors) == (65, True)


def test_one_that_is_missing_is_no_fresh_start(saved: Path) -> None:
    ended = _run(f"--load {saved}/iter_0000007", 2)
    assert ended.code == 65
    assert "iter_0000007 is missing or not whole; the whole checkpoints in" in ended.errors
    with pytest.raises(DataError, match="those of: 1, 2, 3"):
        checkpoint_at(saved / "iter_0000007")


def test_what_cannot_be_meant(saved: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "good"
    shutil.copytree(saved / "iter_0000001", renamed)
    for flags, words in (
        (f"--load {saved}/{TRACKER}", f"is a file, not a folder of checkpoints; use --load {saved}\n"),
        (f"--load {saved}/{TRACKER} --exit-on-missing-checkpoint", "is a file, not a folder of checkpoints"),
        (f"--load {saved}/iter_0000001/.metadata", f"use --load {saved}/iter_0000001\n"),
        (f"--load {saved}/iter_0000002 --ckpt-step 1", "and --ckpt-step 1 another; leave --ckpt-step out"),
        (f"--load {renamed}", "rename it to iter_ and the iteration in seven digits"),
    ):
        ended = _run(flags)
        assert ended.code == 64, flags
        assert words in ended.errors
        assert ended.output == ""


@pytest.mark.parametrize("name", ["iter_0000009", "release", "new"])
def test_a_folder_of_any_name_may_be_begun_and_resumed(name: str, tmp_path: Path) -> None:
    """A launch script has --save X --load X from its first start on; a start afresh is said."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "notes.txt").touch()
    if name == "iter_0000009":
        (folder / TRACKER).write_text("1")  # begun before: without a tracker or a checkpoint it would be a checkpoint
        assert _run(f"--load {folder}").code == 65
        (folder / TRACKER).unlink()
        assert _run(f"--save {folder}").code == 0
    else:
        assert f"checkpoint: starting afresh: none in {folder}" in _run(f"--load {folder} --save {folder}").output
    assert f"checkpoint: resuming at iteration 3 of {folder}" in _run(f"--load {folder}").output
