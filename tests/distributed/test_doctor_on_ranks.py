"""tools/doctor.py --collectives on real ranks: all well, a rank that never comes, one that stops in the middle."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.doctor import collectives
from megatron_ext.doctor.collectives import NotTheReporter, _report
from megatron_ext.errors import PeerLostError
from megatron_ext.verify.ranks import RankError, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def exercise(seconds: float, absent: int | None = None) -> list[str]:
    """What a rank says; `absent` does not take part."""
    if int(os.environ["RANK"]) == absent:
        return []
    try:
        return [finding.text() for finding in collectives.check_collectives("cpu", seconds, megabytes=1)]
    except NotTheReporter:
        return ["silent"]
    except PeerLostError as lost:
        return [str(lost)]


def exercise_until_stopped(seconds: float, folder: str) -> None:
    """The last rank stops in the ring; the first to end ends it. What the others say goes to a file in `folder`."""
    pid, said = Path(folder) / "pid", Path(folder) / "said"
    if int(os.environ["RANK"]) == 2:
        pid.write_text(str(os.getpid()))
        collectives._Exercise._ring = _stop
    for line in exercise(seconds):
        with said.open("a") as file:
            file.write(f"{line}\n")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def _stop(self: collectives._Exercise) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def test_ranks_that_answer() -> None:
    first, *others = run_ranks(3, exercise, 60.0)
    assert others == [[], []]
    text = "\n".join(first)
    assert text.startswith("ok       3 ranks over gloo (3 on ")
    assert "all-reduce, ring and barrier are right" in text
    assert "all-reduce of 1 MB: " in text


def test_a_rank_that_never_comes_is_named() -> None:
    began = time.monotonic()
    said = run_ranks(3, exercise, 2.0, 1)
    assert time.monotonic() - began < 30
    [message] = [line for rank in (0, 2) for line in said[rank] if line != "silent"]
    assert message.startswith("start: rank 1 did not come, within 2 s")


def test_a_rank_that_stops_in_the_middle_is_named(tmp_path: Path) -> None:
    """Its connections stay open, so that the others hear nothing from it."""
    with pytest.raises(RankError) as caught:
        run_ranks(3, exercise_until_stopped, 3.0, str(tmp_path))
    assert [rank for rank, _ in caught.value.tracebacks] == [2]
    [message] = [line for line in (tmp_path / "said").read_text().splitlines() if line != "silent"]
    assert message.startswith("ring: rank 2 (")
    assert "came and no longer answers, within 3 s" in message


def test_a_slow_link_is_named() -> None:
    hosts = ["a", "a", "b", "b"]
    assert [finding.level for finding in _report(hosts, "nccl", [9.0, 90.0, 9.0, 90.0])] == ["ok", "ok"]
    found = _report(["a"] * 4, "nccl", [90.0, 90.0, 9.0, 90.0])[1]
    assert found.level == "warning"
    assert "slowest 9.00 from rank 1 (a) to rank 2 (a)" in found.what


def test_under_torchrun_and_without_it() -> None:
    program = [sys.executable, "tools/doctor.py", "--collectives", "--device", "cpu", "--megabytes", "1"]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    alone = subprocess.run(program, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert alone.returncode == 64
    assert "torchrun --nproc-per-node 2 tools/doctor.py --collectives" in alone.stderr
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program[1:]]
    both = subprocess.run(launch, cwd=ROOT, env=clean, capture_output=True, text=True, check=False, timeout=200)
    assert both.returncode == 0, both.stderr
    assert "2 ranks over gloo" in both.stdout
