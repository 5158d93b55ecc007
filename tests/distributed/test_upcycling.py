"""A mixture of experts that begins from a dense checkpoint is the dense model in its first step, in every layout."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.program import Ended, run_program

MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --disable-bias-linear
    --position-embedding-type rope --mock-data --vocab-size 61 --make-vocab-size-divisible-by 16 --seq-length 16
    --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-2 --lr-decay-style constant --hidden-dropout 0
    --attention-dropout 0 --eval-interval 0 --init-method-std 0.2 --log-interval 1
"""
UPCYCLE = "--moe-use-upcycling --num-experts 4"
SIGMOID = f"{UPCYCLE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
PIECES = "--moe-use-upcycling --num-experts 8 --moe-upcycling-granularity 2 --moe-ffn-hidden-size 24"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"


def _run(flags: str, folder: Path, ranks: int = 1) -> tuple[Ended, list[float]]:
    """Run the program; return how its last rank ended, and the losses of its steps."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    ended = run_ranks(ranks, run_program, shlex.split(f"{MODEL} {flags} --metrics-file {metrics}"))[-1]
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    return ended, [json.loads(row)["lm_loss"] for row in rows]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """By activation a checkpoint, and the loss of a step that begins with its weights."""
    found = {}
    for activation in ("--swiglu", "--squared-relu"):
        folder = tmp_path_factory.mktemp("dense")
        ended, _ = _run(f"{activation} --save {folder}/saved --save-interval 2", folder)
        assert ended.code == 0, ended.errors
        _, losses = _run(f"{activation} --finetune --load {folder}/saved --exit-interval 1", folder)
        found[activation] = (folder / "saved", losses[0])
    return found


@pytest.mark.first("--squared-relu-flags6-4")
@pytest.mark.parametrize(
    ("activation", "flags", "ranks"),
    [
        ("--swiglu", UPCYCLE, 1),
        ("--swiglu", f"{SIGMOID} --expert-model-parallel-size 2", 2),
        ("--swiglu", f"{UPCYCLE} {TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 {ALL_TO_ALL}", 2),
        ("--swiglu", f"{UPCYCLE} {TP2} --pipeline-model-parallel-size 2 --use-distributed-optimizer", 4),
        ("--swiglu", f"{UPCYCLE} {ZERO_3}", 2),
        ("--squared-relu", PIECES, 1),
        ("--squared-relu", f"{PIECES} {TP2} --expert-model-parallel-size 2", 4),
    ],
)
def test_the_first_step_is_that_of_the_dense_model(
    activation: str, flags: str, ranks: int, dense: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    """Where the weights of a token's experts add up to 1; with pieces of an MLP, where scaling weights scales it."""
    folder, loss = dense[activation]
    ended, losses = _run(f"{activation} {flags} --load {folder} --exit-interval 1", tmp_path, ranks)
    assert ended.code == 0, ended.errors
    assert losses[0] == pytest.approx(loss, rel=1e-6)


def test_every_layout_goes_on_as_one_process(dense: dict[str, tuple[Path, float]], tmp_path: Path) -> None:
    """The second step has learned with the router's own random weights, and the masters are those of the experts."""
    folder, _ = dense["--swiglu"]
    flags = f"--swiglu {PIECES} --load {folder}"
    _, alone = _run(flags, tmp_path)
    for layout in ("--expert-model-parallel-size 2 --use-distributed-optimizer", ZERO_3):
        ended, losses = _run(f"{flags} {layout}", tmp_path, 2)
        assert ended.code == 0, ended.errors
        assert losses == pytest.approx(alone, rel=1e-5), layout


def test_a_restart_resumes_the_experts_that_were_saved(dense: dict[str, tuple[Path, float]], tmp_path: Path) -> None:
    folder, _ = dense["--swiglu"]
    saved = f"--swiglu {UPCYCLE} --save {tmp_path}/moe --save-interval 1"
    _, whole = _run(f"{saved} --load {folder}", tmp_path)
    ended, rest = _run(f"{saved} --load {tmp_path}/moe --ckpt-step 1", tmp_path)
    assert ended.code == 0, ended.errors
    assert rest == whole[1:]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{UPCYCLE} --moe-ffn-hidden-size 24", "--moe-ffn-hidden-size 24 x --moe-upcycling-granularity 1"),
        (f"{UPCYCLE} --moe-shared-expert-intermediate-size 16", "a dense model has no shared experts"),
        (f"{UPCYCLE} --moe-layer-freq [0,1]", "every layer gets experts"),
        (f"{PIECES} --moe-router-topk 3", "--moe-router-topk 3 is not divisible by --moe-upcycling-granularity 2"),
        ("--moe-use-upcycling", "--moe-use-upcycling without --num-experts"),
    ],
)
def test_what_an_mlp_cannot_become_is_refused(
    flags: str, problem: str, dense: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    ended, _ = _run(f"--swiglu {flags} --load {dense['--swiglu'][0]}", tmp_path)
    assert ended.code == 64
    assert problem in ended.errors
