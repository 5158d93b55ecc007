"""A killed run, started again by hand or by torchrun, leaves the metrics file of an untouched one, float for float.

With dropout, and at the kill: inside warmup and batch ramp-up, off a logging interval, an epoch of the data ahead.
"""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.killed_training import last_iteration
from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.forkserver.ranks import run_ranks
from tests.support.corpora import write_corpus
from tests.support.launched import (
    Launched,
    end_all,
    finish,
    free_port,
    rank_processes,
    reproducible_rows,
    start,
    wait_until,
)
from tests.support.program import run_program

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0.1 --hidden-dropout 0.1 --tokenizer-type NullTokenizer --vocab-size 61
    --make-vocab-size-divisible-by 16 --split 80,20,0 --micro-batch-size 1 --global-batch-size 8
    --rampup-batch-size 2 2 60 --train-samples 160 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
    --lr-warmup-samples 50 --eval-interval 7 --eval-iters 1 --log-interval 3 --save-interval 5
""")
SAVED_AT, KILLED_AFTER = 10, 12
Run = Callable[..., Launched]
CASES: dict[str, tuple[int, list[str]]] = {
    "fp32": (
        4,
        shlex.split(
            "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        ),
    ),
    "bf16": (1, shlex.split("--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope")),
    # Skips steps before and after the kill.
    "fp16": (1, shlex.split("--fp16 --initial-loss-scale 2e8 --loss-scale-window 4 --hysteresis 1")),
}


# In every run rank 0 is killed, which writes the metrics; with --all under two launchers, and rank 3 after it.
@pytest.mark.parametrize(
    ("precision", "kills"),
    [("fp16", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fp32", 1), ("fp32", 2), ("bf16", 1)))],
)
def test_killed_run_is_the_uninterrupted_one(precision: str, kills: int, tmp_path: Path) -> None:
    ranks, flags = CASES[precision]
    corpus = tmp_path / "corpus"
    write_corpus(corpus, tokens=1200)  # 30 training samples in an epoch
    flags = [*FLAGS, "--data-path", str(corpus), *flags]

    def words(folder: Path) -> list[str]:
        paths = ["--save", str(folder), "--load", str(folder), "--data-cache-path", str(folder / "cache")]
        return [*flags, *paths]

    a, b = tmp_path / "a", tmp_path / "b"
    kill_and_go_on = _start_again_by_hand if ranks == 1 else partial(_let_two_agents_restart, kills)
    left = kill_and_go_on(lambda log, torchrun=(): start(words(b), log, torchrun), b, tmp_path)
    assert {ended.code for ended in run_ranks(ranks, run_program, words(a))} == {0}

    expected = reproducible_rows(a / "metrics.jsonl")
    assert reproducible_rows(b / "metrics.jsonl") == expected
    steps = [row for row in expected if "lm_loss" in row]
    assert KILLED_AFTER <= left < steps[-1]["iteration"], "it must be killed before its end"
    resumed, last = next(row for row in steps if row["iteration"] > SAVED_AT), steps[-1]
    assert resumed["global_batch_size"] < last["global_batch_size"], "the save must be inside the batch ramp-up"
    assert resumed["consumed_samples"] < 50 < last["consumed_samples"], "the save must be inside the warmup"
    skipped = [row["iteration"] for row in steps if row["skipped_iterations"]]
    if precision == "fp16":
        assert min(skipped) < SAVED_AT < max(skipped)
    else:
        assert not skipped


def _start_again_by_hand(run: Run, save: Path, logs: Path) -> int:
    """Kill the process, start it again, and return the last iteration on record at the kill."""
    log = logs / "b.log"
    process = run(log)
    try:
        wait_until(lambda: last_iteration(save) >= KILLED_AFTER, log, process)
        process.kill()
        assert process.wait(60) != 0
    finally:
        end_all(process)
    left = last_iteration(save)
    assert SAVED_AT in saved_iterations(save)
    finish(run(log), log)
    return left


def _let_two_agents_restart(kills: int, run: Run, save: Path, logs: Path) -> int:
    """Kill rank 0 and, for the second kill, later rank 3, of two torchruns as on two machines, which restart them."""
    port = str(free_port())
    node = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    files = [logs / "agent0.log", logs / "agent1.log"]
    agents = [run(log, [*node, "--node-rank", str(n), "--max-restarts", "4"]) for n, log in enumerate(files)]
    try:
        wait_until(lambda: last_iteration(save) >= KILLED_AFTER, files[0], *agents)
        rank_processes(agents[0])[0].kill()
        left = last_iteration(save)
        if kills > 1:
            wait_until(lambda: last_iteration(save) >= KILLED_AFTER + 5, files[0], *agents)
            rank_processes(agents[1])[3].kill()
        for agent, log in zip(agents, files, strict=True):
            finish(agent, log)
    finally:
        for agent in agents:
            end_all(agent)
    assert files[0].read_text().count("checkpoint: resuming at iteration") >= kills
    return left
