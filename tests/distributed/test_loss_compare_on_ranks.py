"""tools/loss_compare.py, on a copy of this tree: equal code is identical, a planted change is named where it begins."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRANCE = 'if __name__ == "__main__":\n'
# With --optimizer sgd alone. The first update is the same whatever the momentum, so the weights after the second are
# the first to tell.
PLANTED = '    sys.argv += ["--sgd-momentum", "0.90625"] * ("sgd" in sys.argv)\n'


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def repository(folder: Path) -> Path:
    """A repository whose only commit is the program as it is here."""
    for name in ("megatron_ext", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt.py", folder)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "base")
    return folder


@pytest.mark.slow  # test_golden_losses.py runs layouts in the same way and sees one bit
def test_a_planted_change_is_named_and_equal_code_is_identical(tmp_path: Path) -> None:
    copy, output = repository(tmp_path / "copy"), tmp_path / "verdicts.jsonl"
    program = copy / "pretrain_gpt.py"
    assert program.read_text().count(ENTRANCE) == 1
    program.write_text(program.read_text().replace(ENTRANCE, ENTRANCE + PLANTED))
    words = ["HEAD", "--layouts", "one process, packed", "one process, SGD", "--output", str(output), "--files"]
    command = [sys.executable, "tools/loss_compare.py", *words]
    ended = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    verdicts = {row["layout"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert verdicts["one process, packed"] == {"layout": "one process, packed", "difference": None, "files": []}
    assert verdicts["one process, SGD"]["difference"].startswith("train: step 2: params_norm is 0x1.")
    assert "1 of 2 layouts are identical" in ended.stdout
    again = subprocess.run([*command, "--skip-done"], cwd=copy, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, "0 of 0 layouts are identical\n")
