"""tools/doctor.py --collectives on real ranks: all well, a rank that never comes, one that stops in the middle."""

import contextlib
import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.commandline import run_tool
from megatron_ext.errors import PeerLostError
from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.plugins.doctor import collectives
from megatron_ext.plugins.doctor.collectives import NotTheReporter
from megatron_ext.plugins.doctor.commands.doctor import main
from tests.support.launched import finish, start_torchrun

# Of the second tier: tests/plugins/doctor.
pytestmark = pytest.mark.full


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


def exercise_until_stopped(seconds: float, folder: str, late: int) -> None:
    """The last rank stops in the ring; the rank that reports it, ends it. What it says goes to a file in `folder`.

    Rank 0 waits for the last rank in the ring, rank 1 in the barrier; `late` is the one that is the second to report.
    """
    pid, said = Path(folder) / "pid", Path(folder) / "said"
    rank = int(os.environ["RANK"])
    if rank == 2:
        pid.write_text(str(os.getpid()))
        collectives._Exercise._ring = _stop
    [line] = exercise(seconds + (20 if rank == late else 0))
    if line != "silent":  # the late rank may hear of the end, and come by here, before it is ended too
        said.write_text(line)
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
    assert time.monotonic() - began < 120, "torch itself would wait for half an hour"
    [message] = [line for rank in (0, 2) for line in said[rank] if line != "silent"]
    assert message.startswith("start: rank 1 did not come, within 2 s")


# Slow: the other rank reports late; both orders are judged alike.
@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_stops_in_the_middle_is_named(tmp_path: Path, late: int) -> None:
    """Its connections stay open, so that the others hear nothing from it. Whoever reports it says where it stopped."""
    with pytest.raises(RankError) as caught:
        run_ranks(3, exercise_until_stopped, 5.0, str(tmp_path), late)
    assert [rank for rank, _ in caught.value.tracebacks] == [2]
    message = (tmp_path / "said").read_text()
    assert message.startswith("ring: rank 2 (")
    assert "came and no longer answers, within 5 s" in message


WORDS = ["tools/doctor.py", "--collectives", "--device", "cpu", "--megabytes", "1"]
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in OF_A_LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", WORDS)
    with pytest.raises(SystemExit) as ended:
        run_tool(main)
    assert ended.value.code == 64
    assert "torchrun --nproc-per-node 2 -m megatron_ext doctor --collectives" in capsys.readouterr().err


def the_program() -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return main(WORDS[1:]), said.getvalue()


def test_the_program_on_ranks() -> None:
    (code, said), other = run_ranks(2, the_program)
    assert code == 0
    assert "2 ranks over gloo" in said
    assert other == (0, "")


@pytest.mark.slow  # the same ranks, which torchrun starts
def test_under_torchrun(tmp_path: Path) -> None:
    log = tmp_path / "log"
    finish(start_torchrun(["--standalone", "--nproc-per-node", "2", *WORDS], log), log)
    assert "2 ranks over gloo" in log.read_text()
