"""Losses are those of tests/golden/losses, to the bit on the machine that wrote them; tools/loss_compare.py, on a copy
of this tree, names where a planted change begins.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.losses import golden, layouts
from tests.support.losses.commits import ROOT, scratch_folder
from tests.support.losses.run import run_job

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "losses"


def newest(folder: Path) -> Path:
    """The file of the newest torch, for one that has none of its own."""
    return max(folder.iterdir(), key=lambda path: tuple(map(int, path.stem.removeprefix("torch-").split("."))))


def trained_here(monkeypatch: pytest.MonkeyPatch) -> golden.Losses:
    """As `golden.train`, whose process of its own loads everything anew."""
    with scratch_folder() as scratch:
        monkeypatch.chdir(scratch)
        return {name: golden.losses_of(run_job(str(ROOT), job)) for name, job in layouts.golden_jobs().items()}


def test_losses_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = golden.file_for(FOLDER)
    kept = json.loads((own if own.exists() else newest(FOLDER)).read_text())
    expected = kept.pop("losses")
    tolerance = 0.0 if kept == golden.here() else golden.TOLERANCE
    assert list(golden.differences(expected, trained_here(monkeypatch), tolerance)) == []


def test_one_bit_is_a_difference() -> None:
    one, other = ({"FSDP2": {"lm_loss": [number.hex()]}} for number in (5.5, 5.5 + 2**-50))
    assert list(golden.differences(one, other, 1e-6)) == []
    assert list(golden.differences(one, other, 0.0)) == [
        "FSDP2: number 1 of lm_loss is 0x1.6000000000000p+2 and 0x1.6000000000001p+2 (5.5 and 5.500000000000001)"
    ]


def test_a_missing_number_and_nan_are_differences() -> None:
    one = {"FSDP2": {"lm_loss": [(5.5).hex(), (5.25).hex()]}}
    assert list(golden.differences(one, {"FSDP2": {"lm_loss": [(5.5).hex()]}}, 1e-6)) != []
    assert list(golden.differences(one, {"FSDP2": {"lm_loss": [(5.5).hex(), "nan"]}}, 1e-6)) != []


ENTRANCE = 'if __name__ == "__main__":\n'
# With --optimizer sgd alone. The first update is the same whatever the momentum, so the weights after the second are
# the first to tell.
PLANTED = '    sys.argv += ["--sgd-momentum", "0.90625"] * ("sgd" in sys.argv)\n'


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def repository(folder: Path) -> Path:
    """A repository whose only commit is the program as it is here, and what its tools share with tests."""
    for name in ("megatron_ext", "tools", "tests/support"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt.py", folder)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "base")
    return folder


@pytest.mark.slow  # the tests above run layouts in the same way and see one bit
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
