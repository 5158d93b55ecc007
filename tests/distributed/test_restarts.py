"""Under torchrun --max-restarts: a killed rank comes back, a stopped run does not. No rank outlives its launcher."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.killed_training import last_iteration
from tests.support.launched import end_all, rank_processes, start, wait_until
from tests.support.program import tiny
from tests.support.warm_python import warm_python

# Of the second tier: tests/distributed/test_kill_and_resume.py kills, and tests/unit/resilience restarts.
pytestmark = pytest.mark.full

FLAGS = tiny("--log-interval 1 --save-interval 5 --train-iters 100000")
TORCHRUN = ["--standalone", "--nproc-per-node", "2", "--max-restarts"]


# In every run test_kill_and_resume.py kills a rank that comes back.
@pytest.mark.parametrize("kills", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_comes_back_a_stop_stays_and_ranks_end_with_their_launcher(kills: int, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = [*FLAGS, "--save", str(save), "--load", str(save)]
    first, second = tmp_path / "first.log", tmp_path / "second.log"

    process = start(flags, first, [*TORCHRUN, str(kills + 1)], warm_python(tmp_path / "bin"))
    try:
        wait_until(lambda: last_iteration(save) >= 6, first, process)
        if kills:
            rank_processes(process)[0].kill()
            wait_until(lambda: "resuming at iteration" in first.read_text(), first, process)
            wait_until(lambda: last_iteration(save) >= 12, first, process)
        rank_processes(process)[1].send_signal(signal.SIGTERM)
        assert process.wait(300) == 1
    finally:
        end_all(process)
    stopped_at = last_iteration(save)
    record = json.loads((save / "exit.json").read_text())
    assert (record["code"], record["iteration"]) == (75, stopped_at), "what came after the stop is in the way"
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(stopped_at)
    said = first.read_text()
    assert said.count("resuming at iteration") == kills, "the restarts after the stop must train no further"
    told = rf"^rank [01]: stopped at iteration {stopped_at}: .*\(restart {kills + 1} of this launch: nothing was "
    assert 1 <= len(re.findall(told, said, re.MULTILINE)) <= 2, "whichever rank ends first says why"

    process = start(flags, second, [*TORCHRUN, "1"])
    ranks = {}
    try:
        wait_until(lambda: last_iteration(save) >= stopped_at + 2, second, process)
        ranks = rank_processes(process)
        listening = [listening_addresses(rank) for rank in ranks.values()]
        ranks[1].suspend()
        time.sleep(0.5)  # rank 0 waits for it in a collective
        process.kill()
        process.wait()
        psutil.wait_procs([ranks[0]], timeout=10)
        assert has_ended(ranks[0]), "a rank that hangs outlives its launcher"
        ranks[1].resume()
        psutil.wait_procs([ranks[1]], timeout=10)
        assert has_ended(ranks[1])
    finally:
        end_all(process)
        for rank in ranks.values():
            if not has_ended(rank):
                rank.kill()
    assert listening == [{"127.0.0.1"}] * 2, "ranks of one machine listen on its loopback interface alone"
    said = second.read_text()
    assert f"resuming at iteration {stopped_at} of" in said, "a new launch goes on"
    assert f"rank 0: the launcher (torchrun, process {process.pid}) is gone at iteration" in said
    assert json.loads((save / "exit.json").read_text())["code"] == 76


def listening_addresses(process: psutil.Process) -> set[str]:
    return {found.laddr[0] for found in process.net_connections("inet") if found.status == psutil.CONN_LISTEN}


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
