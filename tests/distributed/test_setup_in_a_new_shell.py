"""A checkout that was set up works in a shell that knows the system's programs alone, as the README says."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.fresh_environment import make_environment

# Of the second tier: every run of the tests has set up an environment.
pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("megatron_ext", "tools", "tasks", "examples")
FILES = ("pretrain_gpt.py", "pyproject.toml", "README.md", "LICENSE", "requirements.txt", "requirements-dev.txt")
GPU_RUN = {"TRAIN": "t", "VALID": "v", "TOKENIZER": "t", "SAVE": "s"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check out")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, folder / file)
    return folder


def in_new_shell(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run lines of bash in an environment with nothing in it."""
    given = {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], **variables}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=given, capture_output=True, text=True, timeout=540, check=False
    )


def test_without_a_set_up_it_is_said_how_to_make_one(checkout: Path) -> None:
    """Launch scripts install nothing: they may be started on a hundred machines at once."""
    (checkout / "bin").mkdir(exist_ok=True)
    for script in ("recipes/run.sh llama3.1-8b --reduced", "pretrain_gpu.sh"):
        ended = in_new_shell(checkout, f"bash examples/{script}", **GPU_RUN, PATH="/usr/bin:/bin:bin")
        if shutil.which("python", path="/usr/bin:/bin") is None:
            assert ended.returncode == 64, ended.stderr
            assert "bash tools/environment.sh requirements.txt" in ended.stderr
        assert not (checkout / ".venv").exists()


def test_what_the_set_up_leaves_works_in_a_new_shell(checkout: Path) -> None:
    make_environment(checkout / ".venv")
    set_up = in_new_shell(checkout, "bash tools/environment.sh requirements.txt", PIP_NO_INDEX="1")
    assert set_up.returncode == 0, set_up.stdout + set_up.stderr
    again = in_new_shell(checkout, "bash tools/environment.sh requirements.txt", PIP_NO_INDEX="1")
    assert (again.returncode, again.stdout) == (0, ""), "installed once"
    # Scripts enter the environment themselves.
    reduced = in_new_shell(checkout, "bash examples/recipes/run.sh llama3.1-8b --reduced")
    assert reduced.returncode == 0, reduced.stdout[-2000:] + reduced.stderr[-2000:]
    assert " iteration        5/       5 |" in reduced.stdout
    [line] = re.findall(r"^(source \S+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = ("python pretrain_gpt.py --help", "megatron-ext --help", "megatron-ext plan --help", "torchrun --help")
    for command in commands:
        ended = in_new_shell(checkout, f"{line}\n{command}")
        assert ended.returncode == 0, ended.stderr
        assert "usage: " in ended.stdout
    where = in_new_shell(checkout, f"{line}\ncd /\npython -c 'import megatron_ext; print(megatron_ext.__file__)'")
    assert where.stdout.strip() == str(checkout / "megatron_ext/__init__.py"), "the sources as they are here"
