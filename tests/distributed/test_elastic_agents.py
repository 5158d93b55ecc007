"""--elastic under `torchrun --nnodes 1:2`: a machine is lost and comes back, on the curve of an untouched run."""

import socket
from pathlib import Path

import pytest

from benchmarks.killed_training import last_iteration
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.resilience.elastic import NO_SHARED_STORE
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.launched import (
    ROOT,
    Launched,
    end_all,
    finish,
    free_port,
    rank_processes,
    start_torchrun,
    wait_until,
)
from tests.support.program import run_program, tiny
from tests.support.warm_python import warm_python

# Of the second tier: tests/distributed/test_restarts.py restarts ranks of one machine.
pytestmark = pytest.mark.full

FLAGS = tiny("""
    --attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 --use-distributed-optimizer --train-iters 20
    --lr-warmup-iters 10 --log-interval 1 --save-interval 5
""")

ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", NO_SHARED_STORE: "1"}


def test_a_lost_machine_costs_its_ranks_and_comes_back(tmp_path: Path) -> None:
    """The second machine has two ranks; of three, a batch of 8 leaves one as a spare."""
    save, gate, port = tmp_path / "save", tmp_path / "gate", free_port()
    gate.write_text("8")
    python = warm_python(tmp_path / "bin")
    agents: list[Launched] = []
    logs = [tmp_path / f"agent{number}.log" for number in range(3)]

    def begin(ranks: int) -> None:
        rendezvous = "keep_alive_interval=2,keep_alive_max_attempt=8,last_call_timeout=5"
        words = ["--nnodes", "1:2", "--nproc-per-node", str(ranks), "--max-restarts", "5", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--rdzv-conf", rendezvous]
        program = [str(ROOT / "tests/support/paced_program.py"), str(tmp_path), "--device", "cpu", "--elastic"]
        program += [*FLAGS, "--save", str(save), "--load", str(save)]
        log = logs[len(agents)]
        agents.append(start_torchrun([*words, *program], log, {**ENVIRONMENT, **python}))

    try:
        begin(1)
        wait_until(lambda: _listens(port), logs[0], agents[0])  # the one that holds the rendezvous
        begin(2)
        wait_until(lambda: last_iteration(save) == 8, logs[0], agents[0])
        lost = rank_processes(agents[1]).values()
        end_all(agents[1])
        for process in lost:  # with the machine; without their launcher they would end by themselves, a step later
            process.kill()
        gate.write_text("12")
        wait_until(lambda: last_iteration(save) == 12, logs[0], agents[0])
        pid = rank_processes(agents[0])[0].pid
        begin(2)
        wait_until(lambda: {process.pid for process in rank_processes(agents[0]).values()} != {pid}, logs[0], agents[0])
        gate.write_text("20")
        finish(agents[0], logs[0])
        finish(agents[2], logs[2])
    finally:
        for agent in agents:
            end_all(agent)

    lines = [line.split() for line in (tmp_path / "worlds").read_text().splitlines()]
    worlds = {int(step): int(ranks) for step, ranks in lines}
    assert {step: worlds[step] for step in (5, 6, 12, 14, 20)} == {5: 2, 6: 1, 12: 1, 14: 2, 20: 2}
    said = "".join(log.read_text() for log in logs)
    assert "elastic: 3 ranks are there, of which the layout uses 2; the others wait as spares" in said
    assert "resuming at iteration 5 of" in said, "the loss costs the steps since the last checkpoint"
    assert "resuming at iteration 13 of" in said, "to grow costs none"

    whole = tmp_path / "whole.jsonl"
    assert {ended.code for ended in run_ranks(1, run_program, [*FLAGS, "--metrics-file", str(whole)])} == {0}
    rows, expected = list(read_rows(save / "metrics.jsonl")), list(read_rows(whole))
    assert [row["iteration"] for row in rows] == [row["iteration"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row["consumed_samples"] == other["consumed_samples"]
        assert row["lm_loss"] == pytest.approx(other["lm_loss"], abs=1e-6)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
