"""The commands of docs/data.md work as they stand."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python import warm_python

# Of the second tier: tests/plugins/prepare has the programs of the page.
pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]


def test_the_commands_of_the_page(tmp_path: Path):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    shutil.copy(ROOT / "tests" / "golden" / "preprocess" / "input.jsonl", tmp_path / "corpus.jsonl")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    result = subprocess.run(
        ["bash", "-euc", "".join(blocks)],
        cwd=tmp_path,
        env=os.environ | warm_python(tmp_path / "bin"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"merged: whole, every token is below 257, as the checksums of its manifest say\n"
        r"train: \d+ samples of corpus_text_document\n",
        result.stdout,
    )
    assert "--- sample 36: window " in result.stdout
