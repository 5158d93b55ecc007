"""The disk is full: exit 74, the partial folder is removed, and the earlier checkpoints are as they were."""

import resource
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.verify.ranks import RankError, run_ranks
from tests.support.checkpoints import FLAGS, build, file_hashes, save_at
from tests.support.program import run_program

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


def _limited(limit: int, folder: str) -> None:
    """Save when no file may grow beyond `limit` bytes: past the check of the free space, in the middle of a write."""
    run = build(FLAGS)
    run.state.iteration = 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    save_checkpoint(run, folder)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(1, save_at, str(tmp_path), [1], FLAGS)
    before = file_hashes(tmp_path)
    with pytest.raises(RankError, match=r"StorageError: cannot save a checkpoint to .*: .*OSError"):
        run_ranks(1, _limited, 100_000, str(tmp_path))
    assert file_hashes(tmp_path) == before
    assert not list(tmp_path.glob(".iter*"))


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
