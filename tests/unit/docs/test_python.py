"""The code of docs/python.md runs as it stands, from the first block to the last, as a script without a guard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_blocks import DOCS, blocks

# Of the second tier: tests/unit/train/test_from_python.py calls the functions with fewer steps.
pytestmark = pytest.mark.full


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    code = [block.text for block in blocks(DOCS / "python.md") if block.language == "python"]
    assert len(code) > 8
    (tmp_path / "page.py").write_text("\n".join(code))
    environment = os.environ | {"PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "page.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    assert "unknown flag --num-layer; did you mean --num-layers?" in ended.stdout
    assert "optimizer=Adafactor cannot be divided over ranks" in ended.stdout
    assert "largest difference of logits to transformers" in ended.stdout
