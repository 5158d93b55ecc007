"""Every shell script of the repository, read by shellcheck."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELLCHECK = shutil.which("shellcheck")


def scripts() -> list[str]:
    """The files that git knows and that begin as a shell script, or that one is made to read."""
    known = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in known if name.endswith((".sh", ".sbatch")) or _begins_as_one(ROOT / name)]


def _begins_as_one(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        line = opened.readline(100)
    return line.startswith(b"#!") and line.split()[-1].endswith((b"bash", b"/sh"))


@pytest.mark.skipif(SHELLCHECK is None, reason="pip install -r requirements-dev.txt")
def test_shellcheck_finds_nothing_in_any_script(tmp_path: Path) -> None:
    found = scripts()
    assert {".ci/run", "examples/quickstart.sh", "examples/slurm/pretrain.sbatch", "tools/environment.sh"} <= set(found)
    checked = subprocess.run([str(SHELLCHECK), *found], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    (tmp_path / "wrong.sh").write_text("#!/bin/bash\nfor file in $(ls *.txt); do rm $file; done\n")
    assert subprocess.run([str(SHELLCHECK), tmp_path / "wrong.sh"], capture_output=True, check=False).returncode == 1
