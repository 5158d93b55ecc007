"""A Python without the packages is told what to run, by every program, in one line."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("__init__.py", "durable.py", "errors.py", "missing_packages.py", "terminal.py")


def ended(*words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a Python without installed packages, in the folder of the program."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "pretrain_gpt.py --device cpu",
        "-m megatron_ext pretrain --dry-run",
        "tools/preprocess_data.py --input text.jsonl",
        "tools/loss_compare.py main",
    ],
)
def test_each_program_says_what_to_run(command: str) -> None:
    run = ended(*command.split())
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (64, "", 1)
    said, _, fix = run.stderr.strip().partition("; run: ")
    # Which one is looked for first is the program's affair.
    packages = "numpy|psutil|pyyaml|tokenizers|torch"
    assert re.fullmatch(f"error: {re.escape(sys.executable)} has no ({packages}), which this program needs", said), (
        run.stderr
    )
    assert fix in (
        f"source {ROOT}/.venv/bin/activate",
        f"cd {ROOT} && bash tools/environment.sh requirements.txt && source .venv/bin/activate",
    )


def test_without_a_checkout_it_names_the_package(tmp_path: Path) -> None:
    package = tmp_path / "megatron_ext"
    package.mkdir()
    for name in ALONE:
        shutil.copy(ROOT / "megatron_ext" / name, package)
    (package / "reader.py").write_text("import yaml")
    run = ended("-c", "import megatron_ext.reader", root=tmp_path)
    asked = (
        f"error: {sys.executable} has no pyyaml, which this program needs; run: {sys.executable} -m pip install pyyaml"
    )
    assert (run.returncode, run.stderr) == (64, f"{asked}\n")


@pytest.mark.parametrize(
    "text", ["import megatron_ext, numpy", "import megatron_ext, nowhere", "import megatron_ext; 1 / 0"]
)
def test_other_errors_are_shown_as_before(text: str) -> None:
    run = ended("-c", text)
    assert run.returncode == 1
    assert run.stderr.startswith("Traceback (most recent call last):")
