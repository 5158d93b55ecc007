"""The load of experts is that of the global batch in every layout, starving experts are named, and the bias of experts
stays where it is in a step that is skipped."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.program import Ended, run_program

# Of the second tier: tests/distributed/test_numbers_of_parts.py compares what parts report.
pytestmark = pytest.mark.full

MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --swiglu --disable-bias-linear
    --position-embedding-type rope --mock-data --vocab-size 61 --make-vocab-size-divisible-by 16 --seq-length 16
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --eval-interval 0
    --init-method-std 0.1 --log-interval 1
"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def _run(flags: str, folder: Path, ranks: int = 1) -> tuple[Ended, list[dict[str, Any]]]:
    """Run the program; return how its first rank ended, and the rows of its steps."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    ended = run_ranks(ranks, run_program, shlex.split(f"{MODEL} {flags} --metrics-file {metrics}"))[0]
    assert ended.code == 0, ended.errors
    return ended, [json.loads(line) for line in metrics.read_text().splitlines()]


LAYOUTS = {
    f"{EXPERTS} {BIAS}": (
        (2, "--expert-model-parallel-size 2"),
        (2, "--context-parallel-size 2 --use-distributed-optimizer"),
        (
            4,
            f"{TP2} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 {ALL_TO_ALL}",
        ),
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 4"),
    ),
    f"{EXPERTS} --num-layers 4 --moe-layer-freq [0,1,1,1] --mtp-num-layers 1": (
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    ),
    f"{EXPERTS} --num-layers 4 --moe-layer-freq [0,1,1,1] --mtp-num-layers 2 --mtp-use-repeated-layer": (
        (2, "--pipeline-model-parallel-size 2"),
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ),
    f"{EXPERTS} --position-embedding-type none --hybrid-layer-pattern *EEE/E* --num-layers 4": (
        (2, "--pipeline-model-parallel-size 2"),
    ),
}


@pytest.mark.parametrize("flags", LAYOUTS)
def test_every_layout_counts_what_one_process_counts(flags: str, tmp_path: Path) -> None:
    """Each token of the global batch once in each pass of a layer, also where it is computed again in the backward
    pass."""
    _, known = _run(f"{flags} --train-iters 2", tmp_path)
    depths = 1 if "mtp" in flags or "/" in flags else 0
    passes = 2 if "repeated" in flags else 1
    for row in known:
        each = 8 * 16 * 2
        assert [sum(counts) for counts in row["expert_tokens"]] == [*[each] * (1 + 2 * depths), each * passes]
        for layer, counts in zip(row["expert_load"], row["expert_tokens"], strict=True):
            assert layer["max_over_mean"] == max(counts) * 4 / sum(counts)
            assert layer["dropped"] == 0.0
            assert 0.0 < layer["entropy"] <= 1.0
    assert [layer["layer"] for layer in known[0]["expert_load"]] == ([1, 2, 3, 4] if depths else [0, 1])
    for ranks, layout in LAYOUTS[flags]:
        _, found = _run(f"{flags} --train-iters 2 {layout}", tmp_path, ranks)
        for one, other in zip(found, known, strict=True):
            assert one["expert_tokens"] == other["expert_tokens"], layout
            for layer, alone in zip(one["expert_load"], other["expert_load"], strict=True):
                assert layer.pop("bias", []) == pytest.approx(alone.get("bias", []), rel=1e-5), layout
                assert layer == pytest.approx({name: alone[name] for name in layer}, rel=1e-5), layout
    assert depths or known[0]["expert_load"][0]["bias"] == pytest.approx([-1e-3, 1e-3]), "one step of 1e-3"


def test_an_expert_without_tokens_for_100_steps_is_named_once(tmp_path: Path) -> None:
    flags = "--num-experts 96 --moe-ffn-hidden-size 8 --num-layers 1 --global-batch-size 1 --train-iters 110 --lr 1e-6"
    ended, rows = _run(flags, tmp_path)
    first = [row["expert_tokens"][0] for row in rows[:100]]
    starved = [expert for expert, counts in enumerate(zip(*first, strict=True)) if not any(counts)]
    assert 0 < len(starved) < 48
    told = re.findall(r"step (\d+): (.*?) had no token in the last 100 steps", ended.errors)
    assert told[0][0] == "100", ended.errors
    named = [int(expert) for expert in re.findall(r"expert (\d+) of layer 0", told[0][1])]
    assert named == starved[:5]
    assert not {"100"} & {step for step, _ in told[1:]}
    for _, later in told[1:]:
        assert not set(named) & {int(expert) for expert in re.findall(r"expert (\d+) of layer 0", later)}


def _biases(flags: str) -> list[tuple[bool, list[float]]]:
    """Take a step whose gradient overflows on the last rank, and one that does not. Whether each was an update, and the
    biases of experts after it."""
    import torch

    from megatron_ext import device
    from megatron_ext.model.names import biases_of_experts
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(shlex.split(f"{MODEL} {flags} --device cpu")).config, device.install("cpu"))
    trainer, found = Trainer(run, []), []
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    weight = [*run.chunks[0].parameters()][-1]
    hook = weight.register_hook(lambda gradient: gradient * float("inf") if last else gradient)
    for _ in range(2):
        updated = trainer.step().updated
        found.append((updated, [float(bias) for _, each in biases_of_experts(run.chunks) for bias in each]))
        hook.remove()
    run.loaders.close()
    return found


@pytest.mark.parametrize(
    "layout", ["", "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2 --moe-layer-freq [0,1]"]
)
def test_a_step_that_the_loss_scale_skips_moves_no_bias(layout: str) -> None:
    flags = f"{EXPERTS} {BIAS} {layout} --fp16 --initial-loss-scale 2048 --hysteresis 1 --train-iters 9"
    for skipped, updated in run_ranks(2 if layout else 1, _biases, flags):
        assert (skipped[0], updated[0]) == (False, True)
        assert not any(skipped[1])
        assert not updated[1] or {round(abs(bias), 6) for bias in updated[1]} <= {0.0, 1e-3}
        assert any(updated[1]) == bool(updated[1])
