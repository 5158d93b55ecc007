"""How processes end under the real launcher: which rank has the last word."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/support/failing_rank.py"


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def ours(output: str) -> list[str]:
    """The lines that ranks wrote: torchrun's begin otherwise, or are indented."""
    return [line for line in output.split("\n") if line.startswith("rank ")]


def torchrun(how: str, save: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(PROGRAM), how, str(save)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, env=environment(), check=False
    )


@pytest.mark.parametrize("shared", [True, False], ids=["with --save", "without"])
def test_under_torchrun_the_failing_rank_has_the_last_word(tmp_path: Path, shared: bool):
    save = tmp_path if shared else Path("-")
    run = torchrun("numeric", save)
    assert run.returncode == 1
    assert ours(run.stdout) == ["rank 1: NaN in layer 3, iteration 5"], run.stdout
    assert run.stdout.count("rank 1: NaN in layer 3, iteration 5") == 2, "torchrun's summary repeats the cause"
    if shared:
        assert json.loads((tmp_path / "exit.json").read_text())["code"] == 70


def test_under_torchrun_a_killed_rank_is_reported_by_the_other(tmp_path: Path):
    run = torchrun("kill", tmp_path)
    (line,) = ours(run.stdout)
    # The survivor may have gone on to the next step before it needed its peer.
    assert re.match(r"rank 0: another rank was lost at iteration [56], without a word why \(.*\)\. Look", line), line
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["rank"], record["message"]) == (76, 0, line)


def test_under_torchrun_rank_0_alone_tells_configuration_errors():
    run = torchrun("configuration", Path("-"))
    assert ours(run.stdout) == [
        "rank 0: 1 problem in the configuration, named above; nothing was started. Change the flags and start again."
    ], run.stdout
    assert "rank 0: --a 1: too small" in run.stdout, "torchrun's summary has the problem itself"
