"""Paths of flags that lead nowhere, or to a pipe: each is an error of the configuration that names its flag, none is
waited for."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_ext.durable import only_files
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.telemetry.metrics_file import MetricsFile
from megatron_ext.train.configure import configure

FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --vocab-size 61
    --micro-batch-size 1 --lr 1e-3 --train-iters 1 --device cpu --mock-data
""")
READ = ("load", "load-hf", "data-path", "data-args-path", "tokenizer-model", "vocab-file", "merge-file", "eval-tasks")
READ += ("config", "skip-samples", "sample-prompts", "per-split-data-args-path")
WRITTEN = ("save", "metrics-file", "tensorboard-dir", "data-cache-path", "log-sample-ids", "memory-snapshot-path")
WRITTEN += ("wandb-save-dir", "non-persistent-local-ckpt-dir")


@pytest.mark.parametrize("flag", [*READ, *WRITTEN])
def test_a_path_that_no_file_can_have_is_named_with_its_flag(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    below = tmp_path / "file" / "below"
    for path in (
        "x" * 300,
        "a\0b",
        tmp_path / "loop",
        *([] if flag == "save" else [below]),
    ):  # --save says it with its lock
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


@pytest.mark.parametrize("flag", READ)
def test_a_pipe_where_a_file_is_to_be_read_is_refused(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe.bin"
    os.mkfifo(path)
    given = path.with_suffix("") if flag == "data-path" else path
    with pytest.raises(ConfigurationError, match=rf"--{flag} {path} is no file, but a pipe"):
        configure([*FLAGS, f"--{flag}", str(given)])


def test_a_configuration_that_can_be_read_only_once_is_refused_and_not_left_out() -> None:
    words = [sys.executable, "pretrain_gpt.py", *FLAGS, "--dry-run"]
    script = f"{shlex.join(words)} --config <(echo 'seed: 77')"
    root = Path(__file__).parents[4]
    ended = subprocess.run(["bash", "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 64
    assert re.match(r"--config /dev/fd/\d+ is no file, but a pipe", ended.stderr)


@pytest.mark.parametrize(
    "flag", ["tensorboard-dir", "wandb-save-dir", "data-cache-path", "non-persistent-local-ckpt-dir"]
)
def test_a_file_or_a_pipe_where_a_folder_is_to_be_is_refused(flag: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for path in (tmp_path / "pipe", tmp_path / "file"):
        with pytest.raises(ConfigurationError, match=rf"--{flag} {path} is no folder"):
            configure([*FLAGS, f"--{flag}", str(path)])


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
import megatron_ext.config.parse.config_file
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
        assert _as_nobody("--load", load) == f"--load {load}: Permission denied"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed who may not read")
@pytest.mark.parametrize("flag", ["config", "skip-samples", "data-args-path", "vocab-file"])
def test_a_file_without_permission_is_named(flag: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        path = Path(made, "file")
        path.touch(mode=0o600)
        assert _as_nobody(f"--{flag}", path) == f"--{flag} {path}: Permission denied"
        path.chmod(0o644)
        os.chmod(made, 0o700)
        assert _as_nobody(f"--{flag}", path) == f"--{flag} {path}: Permission denied"


def _as_nobody(flag: str, path: Path) -> str:
    """Return what the check says to another user, who may not read, without its exit code and advice."""
    words = [sys.executable, "-c", AS_NOBODY, *FLAGS, flag, str(path)]
    ended = subprocess.run(words, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
    before, advice = "74 ", ". Fix the permission, or give another path.\n"
    assert ended.stdout.startswith(before), ended.stderr
    assert ended.stdout.endswith(advice)
    return ended.stdout.removeprefix(before).removesuffix(advice)
