"""A run that is killed and started again leaves the metrics file of a run that nothing happened to, float for float.

With dropout, and at the kill: inside warmup and batch ramp-up, off a logging interval, an epoch of the data ahead.
"""

import shlex
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron_ext.checkpoint.folder import saved_iterations
from megatron_ext.telemetry.jsonl import read_rows
from tests.launched import end_all, finish, free_port, reproducible_rows, start, write_corpus

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0.1 --hidden-dropout 0.1 --tokenizer-type NullTokenizer --vocab-size 61
    --make-vocab-size-divisible-by 16 --split 80,20,0 --micro-batch-size 1 --global-batch-size 8
    --rampup-batch-size 2 2 60 --train-samples 160 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
    --lr-warmup-samples 50 --eval-interval 7 --eval-iters 1 --log-interval 3 --save-interval 5
""")
SAVED_AT, KILLED_AFTER = 10, 12
CASES: dict[str, tuple[int, list[str]]] = {
    "fp32": (2, shlex.split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")),
    "bf16": (1, shlex.split("--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope")),
    # Skips steps before and after the kill.
    "fp16": (1, shlex.split("--fp16 --initial-loss-scale 3e6 --loss-scale-window 4 --hysteresis 1")),
}


@pytest.mark.parametrize("precision", CASES)
def test_killed_run_is_the_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    ranks, flags = CASES[precision]
    corpus = tmp_path / "corpus"
    write_corpus(corpus, tokens=1200)  # 30 training samples in an epoch
    flags = [*FLAGS, "--data-path", str(corpus), *flags]

    def run(folder: Path) -> subprocess.Popen[bytes]:
        torchrun = ["--nproc-per-node", str(ranks), "--master-port", str(free_port())] if ranks > 1 else []
        paths = ["--save", str(folder), "--load", str(folder), "--data-cache-path", str(folder / "cache")]
        return start([*flags, *paths], tmp_path / f"{folder.name}.log", torchrun)

    a, b = tmp_path / "a", tmp_path / "b"
    killed, whole = run(b), run(a)
    try:
        _kill_after(killed, b / "metrics.jsonl", KILLED_AFTER, tmp_path / "b.log")
        left = [row["iteration"] for row in read_rows(b / "metrics.jsonl")]
        assert SAVED_AT in saved_iterations(b)
        finish(whole, tmp_path / "a.log")
        finish(run(b), tmp_path / "b.log")
    finally:
        end_all(killed)
        end_all(whole)

    expected = reproducible_rows(a / "metrics.jsonl")
    assert reproducible_rows(b / "metrics.jsonl") == expected
    steps = [row for row in expected if "lm_loss" in row]
    assert KILLED_AFTER <= max(left) < steps[-1]["iteration"], "it must be killed before its end"
    resumed, last = next(row for row in steps if row["iteration"] > SAVED_AT), steps[-1]
    assert resumed["global_batch_size"] < last["global_batch_size"], "the save must be inside the batch ramp-up"
    assert resumed["consumed_samples"] < 50 < last["consumed_samples"], "the save must be inside the warmup"
    skipped = [row["iteration"] for row in steps if row["skipped_iterations"]]
    if precision == "fp16":
        assert min(skipped) < SAVED_AT < max(skipped)
    else:
        assert not skipped


def _kill_after(process: subprocess.Popen[bytes], metrics: Path, iteration: int, log: Path) -> None:
    """SIGKILL the last rank as soon as `iteration` is on record, and wait for the launcher to give up."""
    deadline = time.monotonic() + 300.0
    while not metrics.exists() or all(row["iteration"] < iteration for row in read_rows(metrics)):
        assert process.poll() is None, f"it ended early:\n{log.read_text(errors='replace')[-5000:]}"
        assert time.monotonic() < deadline, f"no iteration {iteration}:\n{log.read_text(errors='replace')[-5000:]}"
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children()
    victim = max(workers, key=lambda worker: int(worker.environ().get("RANK", "-1"))) if workers else process
    victim.send_signal(signal.SIGKILL)
    assert process.wait(60) != 0
