"""Two torchrun agents, as on two machines, train exactly as the same ranks of one machine do."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.verify.ranks import run_ranks
from tests.support.launched import end_all, finish, free_port, reproducible_rows, start
from tests.support.program import run_program

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0.1 --hidden-dropout 0.1 --mock-data --vocab-size 61 --make-vocab-size-divisible-by 16
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --eval-interval 5 --eval-iters 1
    --log-interval 1
""")
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


# A plain run has two agents of one rank each, which are killed at that: test_kill_and_resume.py.
@pytest.mark.slow
@pytest.mark.parametrize(("each", "more"), [(2, []), (4, TP2)])
def test_two_agents_are_one(each: int, more: list[str], tmp_path: Path) -> None:
    """`each` is the number of ranks of an agent."""

    def flags(name: str) -> list[str]:
        return [*FLAGS, *more, "--metrics-file", str(tmp_path / f"{name}.jsonl")]

    assert {ended.code for ended in run_ranks(2 * each, run_program, flags("one"))} == {0}

    rendezvous = ["--nnodes", "2", "--nproc-per-node", str(each), "--master-addr", "127.0.0.1", "--master-port"]
    rendezvous.append(str(free_port()))
    agents = [
        start(flags("two"), tmp_path / f"agent{node}.log", [*rendezvous, "--node-rank", str(node)]) for node in (0, 1)
    ]
    try:
        for node, agent in enumerate(agents):
            finish(agent, tmp_path / f"agent{node}.log")
    finally:
        for agent in agents:
            end_all(agent)

    rows = reproducible_rows(tmp_path / "two.jsonl")
    assert rows == reproducible_rows(tmp_path / "one.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 5, 5], "five steps, then validation and test"
