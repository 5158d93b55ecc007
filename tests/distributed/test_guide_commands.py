"""The commands of the guides, as they stand on their pages, in the order in which a reader types them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.command_blocks import DOCS, blocks, script
from tests.support.pages import texts
from tests.support.warm_python import warm_python

# Of the second tier: the programs that guides call have tests of their own.
pytestmark = pytest.mark.full

ROOT = DOCS.parent
FIRST = "first_model.md"
OWN_TEST = {"data.md"}  # tests/unit/docs/test_data.py
IN_SECONDS = sorted(
    page.relative_to(DOCS).as_posix()
    for page in DOCS.rglob("*.md")
    if script(page.relative_to(DOCS).as_posix()) and page.name not in {FIRST, *OWN_TEST}
)
SLOW = sorted({each.page for page in DOCS.rglob("*.md") for each in blocks(page) if each.kind == "slow"})


def run(page: str, folder: Path, variables: Mapping[str, str], *kinds: str) -> str:
    """What the commands of a page print; each must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    command = ["bash", "-euo", "pipefail", "-c", script(page, kinds)]
    ended = subprocess.run(
        command, cwd=folder, env=environment | dict(variables), capture_output=True, text=True, timeout=540, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`python` and `torchrun` that have the program loaded, and no threads."""
    folder = tmp_path_factory.mktemp("bin")
    found = warm_python(folder)
    launcher = folder / "torchrun"
    launcher.write_text('#!/bin/bash\nexec python -m torch.distributed.run "$@"\n')
    launcher.chmod(0o755)
    return found | {"OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]) -> tuple[Path, str]:
    """The folder in which the first guide has been followed, and what it printed."""
    folder = tmp_path_factory.mktemp("guide")
    for name in ("pretrain_gpt.py", "tools", "tasks", "examples", "docs", "megatron_ext", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    return folder, run(FIRST, folder, variables, "")


def test_the_first_guide_trains_evaluates_exports_and_writes(first: tuple[Path, str]) -> None:
    folder, printed = first
    [before, after] = [
        float(value) for value in re.findall(r"training loss +([\d.]+) at iteration 1 -> ([\d.]+)", printed)[0]
    ]
    assert before > 6.9
    # Nats, of a corpus that is docs/ itself: 2.65 with a table of 146 kB that repeats itself, 2.38 without.
    assert before - after > 2.0
    assert "largest difference of logits to transformers" in printed
    assert "\nThe checkpoint" in printed
    assert (folder / "model-hf/model.safetensors").is_file()
    page = texts((folder / "run.html").read_text())
    assert "parameters, 4 layers of width 64, fp32\n" in page
    assert "\nlayout           1 rank, TP 1 x PP 1 x CP 1 x DP 1\nended            20" in page


@pytest.mark.parametrize("page", IN_SECONDS)
def test_the_commands_of_a_guide(page: str, first: tuple[Path, str], variables: dict[str, str], tmp_path: Path) -> None:
    folder = shutil.copytree(first[0], tmp_path / "guide", symlinks=True)
    run(page, folder, variables, "")


# Eight ranks on a laptop, and a recipe: tests/parity and test_recipes_train.py train such layouts in every run.
@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_the_slow_commands_of_a_guide(
    page: str, first: tuple[Path, str], variables: dict[str, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(first[0], tmp_path / "guide", symlinks=True)
    run(page, folder, variables, "slow")
