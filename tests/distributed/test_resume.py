"""Saved, ended, and resumed in the same layout: every loss, weight and moment is bitwise the uninterrupted run's.

With dropout, warmup and batch ramp-up under way, and the save in the middle of a logging interval.
"""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.run_state import state_hash
from tests.support.selection import marked
from tests.support.several_models import end_layout

MODEL = shlex.split("""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --mock-data --vocab-size 61
    --make-vocab-size-divisible-by 16 --attention-dropout 0.1 --hidden-dropout 0.1
""")
SCHEDULE = shlex.split("""
    --micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 4 4 30 --train-samples 72 --lr 1e-2 --min-lr 1e-3
    --lr-decay-style cosine --lr-warmup-samples 40 --weight-decay 0.1 --start-weight-decay 0.0 --end-weight-decay 0.1
    --weight-decay-incr-style linear --eval-interval 0
""")
GPT2 = ["--position-embedding-type", "learned_absolute"]
LLAMA = shlex.split("""
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
""")
BF16 = ["--bf16"]
# The scale is too large at first: steps are skipped before and after the save; later it doubles.
FP16 = shlex.split("--fp16 --initial-loss-scale 2.5e6 --loss-scale-window 2 --hysteresis 1")
SGD = ["--optimizer", "sgd"]
LION = shlex.split("--optimizer lion --lr 1e-3")
DP2_OVERLAPPED = shlex.split(
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
)
TP2_PP2_VPP2 = shlex.split("""
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --num-layers 4 --micro-batch-size 1
""")

FP8_TP2 = shlex.split("--bf16 --fp8-format hybrid --ffn-hidden-size 64 --tensor-model-parallel-size 2")

CASES: dict[str, tuple[int, list[str]]] = {
    "fp32": (1, [*GPT2]),
    "bf16": (1, [*LLAMA, *BF16]),
    "fp16": (1, [*GPT2, *FP16]),
    "fp32, SGD": (1, [*GPT2, *SGD]),
    "bf16, SGD without momentum": (1, [*GPT2, *BF16, *SGD, "--sgd-momentum", "0.0"]),
    "fp16, Lion, distributed optimizer": (2, [*LLAMA, *FP16, *LION, *DP2_OVERLAPPED]),
    "fp32, DP2": (2, [*GPT2]),
    "fp32, distributed optimizer": (2, [*LLAMA, *DP2_OVERLAPPED]),
    "bf16, distributed optimizer": (2, [*GPT2, *BF16, *DP2_OVERLAPPED]),
    "fp16, distributed optimizer": (2, [*LLAMA, *FP16, *DP2_OVERLAPPED]),
    "FP8, TP2": (2, [*GPT2, *FP8_TP2]),
    "bf16, TP2 PP2 VPP2, tied": (4, [*GPT2, *BF16, *TP2_PP2_VPP2, "--micro-batch-size", "2"]),
    "fp32, TP2 PP2 VPP2 DP2": (8, [*LLAMA, *TP2_PP2_VPP2]),
    "bf16, TP2 PP2 VPP2 DP2, tied": (8, [*GPT2, *BF16, *TP2_PP2_VPP2]),
}
# A precision, an optimizer and a layout that others have, in another combination: left to --all.
REPEATED = {
    "fp32",
    "fp16",
    "fp32, SGD",
    "fp32, DP2",
    "bf16, distributed optimizer",
    "fp16, distributed optimizer",
    "fp32, TP2 PP2 VPP2 DP2",
    "bf16, TP2 PP2 VPP2 DP2, tied",
}


@dataclass(frozen=True)
class Trace:
    """What one rank computed."""

    losses: list[str]
    grad_norms: list[str | None]
    state: dict[str, Any]
    hashes: list[str]
    """Of weights and optimizer state, where the run was saved or loaded, and at its end."""
    skipped: int


def _train(flags: list[str], load: str | None, steps: int, save: str | None) -> Trace:
    from megatron_ext import device
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure([*flags, "--device", "cpu"]).config, device.install("cpu"))
    hashes = []
    if load is not None:
        assert load_checkpoint(run, load) == run.state.iteration > 0
        hashes.append(state_hash(run))
    trainer = Trainer(run, [])
    results = [trainer.step() for _ in range(steps)]
    if save is not None:
        save_checkpoint(run, save)
    hashes.append(state_hash(run))
    run.loaders.close()
    return Trace(
        losses=[result.loss.hex() for result in results],
        grad_norms=[None if result.grad_norm is None else result.grad_norm.hex() for result in results],
        state=asdict(run.state),
        hashes=hashes,
        skipped=sum(not result.updated for result in results),
    )


def _train_whole_and_begin_again(flags: list[str], save: str) -> tuple[Trace, Trace]:
    """Eight steps without a save, and then, from the beginning, the three steps that a run has done when it ends."""
    whole = _train(flags, None, 8, None)
    end_layout()
    return whole, _train(flags, None, 3, save)


@pytest.mark.first("fp32, distributed optimizer", "bf16, TP2 PP2 VPP2, tied")
@pytest.mark.parametrize("case", marked(CASES, slow=REPEATED))
def test_resumed_run_is_the_uninterrupted_one(case: str, tmp_path: Path) -> None:
    world_size, flags = CASES[case]
    flags = [*MODEL, *SCHEDULE, *flags]
    begun = run_ranks(world_size, _train_whole_and_begin_again, flags, str(tmp_path))
    second = run_ranks(world_size, _train, flags, str(tmp_path), 5, None)
    whole, first = zip(*begun, strict=True)
    for one, before, after in zip(whole, first, second, strict=True):
        assert before.losses + after.losses == one.losses
        assert before.grad_norms + after.grad_norms == one.grad_norms
        assert after.state == one.state
        assert after.hashes[0] == before.hashes[-1], "loading did not give back what was saved"
        assert after.hashes[-1] == one.hashes[-1]
    assert len(set(whole[0].losses)) == 8
    if "fp16" in case:
        assert first[0].skipped > 0
        assert 0 < second[0].skipped < 5


def _decays(flags: list[str], load: str | None, save: str | None) -> list[float]:
    """Return the largest weight decay of the optimizer's groups in each of three steps."""
    from megatron_ext import device
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure([*flags, "--device", "cpu"]).config, device.install("cpu"))
    if load is not None:
        load_checkpoint(run, load)
    trainer, found = Trainer(run, []), []
    for _ in range(3):
        trainer.step()
        found.append(max(group["weight_decay"] for group in run.optimizer.param_groups))
    if save is not None:
        save_checkpoint(run, save)
    run.loaders.close()
    return found


def test_a_resumed_run_has_the_weight_decay_of_its_flags(tmp_path: Path) -> None:
    """megatron-core's scheduler, loaded, goes back to the checkpoint's from its second step on."""
    flags = [*MODEL, *GPT2, *shlex.split("--micro-batch-size 2 --global-batch-size 4 --train-iters 9 --lr 1e-3")]
    flags += ["--eval-interval", "0", "--weight-decay"]
    assert run_ranks(1, _decays, [*flags, "0.1"], None, str(tmp_path)) == [[0.1] * 3]
    assert run_ranks(1, _decays, [*flags, "0.5"], str(tmp_path), None) == [[0.5] * 3]
