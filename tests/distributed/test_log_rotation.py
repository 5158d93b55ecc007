"""A log that logrotate cuts under a running program (copytruncate), written as docs/operations.md says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.program import tiny

# Of the second tier: no line of the program depends on it; tests/unit/test_terminal.py guards what it prints.
pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


def test_a_log_is_cut_under_a_running_program(tmp_path: Path) -> None:
    log, earlier = tmp_path / "run.log", tmp_path / "run.log.1"
    program = shlex.join([sys.executable, str(ROOT / "pretrain_gpt.py"), *tiny("--train-iters 400 --log-interval 1")])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", f"{program} 2>&1 | tee -a {shlex.quote(str(log))} > /dev/null"],
        env=environment,
    ) as running:
        until = time.monotonic() + 120
        while "iteration        5/" not in (log.read_text() if log.exists() else ""):
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        shutil.copyfile(log, earlier)  # as copytruncate does
        os.truncate(log, 0)
        assert running.wait(120) == 0
    first, second = earlier.read_text(), log.read_text()
    assert "\0" not in second, "tee appends: the file begins anew, without a hole of the old length"
    steps = [[int(step) for step in re.findall(r"iteration +(\d+)/", text)] for text in (first, second)]
    assert steps[0][0] == 1
    assert steps[1][-1] == 400
    assert steps[1] == list(range(steps[1][0], 401))
