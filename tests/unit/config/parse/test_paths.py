"""Paths of flags that lead nowhere, or to a pipe: each is an error of the configuration that names its flag, none is
waited for."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_ext.durable import only_files
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.telemetry.jsonl import MetricsFile
from megatron_ext.train.configure import configure

FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --vocab-size 61
    --micro-batch-size 1 --lr 1e-3 --train-iters 1 --device cpu --mock-data
""")
READ = ("load", "load-hf", "data-path", "data-args-path", "tokenizer-model", "vocab-file", "merge-file", "eval-tasks")
READ += ("config", "skip-samples", "sample-prompts")
WRITTEN = ("save", "metrics-file", "tensorboard-dir", "data-cache-path", "log-sample-ids", "memory-snapshot-path")
WRITTEN += ("wandb-save-dir", "non-persistent-local-ckpt-dir")


@pytest.mark.parametrize("flag", [*READ, *WRITTEN])
def test_a_path_that_no_file_can_have_is_named_with_its_flag(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    below = tmp_path / "file" / "below"
    for path in ("x" * 300, tmp_path / "loop", *([] if flag == "save" else [below])):  # --save says it with its lock
        with pytest.raises(ConfigurationError) as refused:
            configure([*FLAGS, f"--{flag}", str(path)])
        assert any(f"--{flag}" in problem for problem in refused.value.problems), refused.value.problems


@pytest.mark.parametrize("flag", ["metrics-file", "log-sample-ids", "memory-snapshot-path", "save"])
def test_a_pipe_where_a_file_is_to_be_written_is_refused(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    given = tmp_path if flag == "save" else path
    with pytest.raises(ConfigurationError, match=rf"--{flag} {path} is no file, but a pipe"):
        configure([*FLAGS, f"--{flag}", str(given)])
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigurationError, match=rf"--{flag} {path} is a folder"):
        configure([*FLAGS, f"--{flag}", str(given)])


def test_a_pipe_that_comes_later_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    for mode in ("rb", "ab", "wb"):
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(OSError, match="it is no file"):
            open(path, mode, opener=only_files)  # noqa: SIM115
        os.close(reader)
    with pytest.raises(StorageError, match=rf"cannot open {path}: it is no file"):
        MetricsFile(path, 0)
    path.unlink()
    with MetricsFile(path, 0) as file:
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(StorageError, match=rf"cannot write {path}: "):
            file.write_row({"iteration": 1})
    with MetricsFile("/dev/null", 0) as file:
        file.write_row({"iteration": 1})


AS_NOBODY = """
import os, sys
from megatron_ext.errors import StorageError
from megatron_ext.train.configure import configure
configure(sys.argv[1:-2])  # imports what that user may not
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    configure(sys.argv[1:])
except StorageError as error:
    print(error.exit_code, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed who may not read")
@pytest.mark.parametrize("mode", [0o000, 0o700, 0o711])
@pytest.mark.parametrize("below", [False, True])
def test_a_folder_without_permission_is_named(mode: int, below: bool, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        os.chmod(made, 0o755)
        closed = Path(made, "closed")
        inside = closed / "inside"
        inside.mkdir(parents=True, mode=0o700)
        closed.chmod(mode)
        load = inside if below else closed
        words = [sys.executable, "-c", AS_NOBODY, *FLAGS, "--load", str(load)]
        root = Path(__file__).parents[4]
        ended = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
        assert ended.stdout == f"74 --load {load}: Permission denied. Fix the permission, or give another path.\n", (
            ended.stderr
        )
