"""Two jobs, one save folder: the second is refused and told of the first; a killed job is in nobody's way."""

import json
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.lock import LOCK
from megatron_ext.verify.ranks import run_ranks
from tests.support.program import run_program
from tests.support.save_lock import held

FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --mock-data
    --vocab-size 61 --make-vocab-size-divisible-by 1 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-interval 0
""")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with held(tmp_path / "save") as process:
        yield process


def test_the_second_job_is_refused_and_the_first_can_be_killed(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = [*FLAGS, "--save", str(save)]
    [refused] = run_ranks(1, run_program, flags)
    assert refused.code == 64
    said = f"--save {save} is in use by another job: process {holder.pid} on {socket.gethostname()}, since 20"
    assert said in refused.errors
    assert sorted(path.name for path in save.iterdir()) == [LOCK], "the first job's folder is left alone"
    holder.kill()  # its forked helper lives on
    holder.wait()
    assert run_ranks(1, run_program, flags)[0].code == 0
    assert (save / "iter_0000001").is_dir()
    assert json.loads((save / LOCK).read_text())["pid"] != holder.pid


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [ended] = run_ranks(1, run_program, [*FLAGS, "--save", str(tmp_path / "file" / "save")])
    assert ended.code == 74
    assert "Not a directory. Fix the folder" in ended.errors.splitlines()[-1]
