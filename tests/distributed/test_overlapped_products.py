"""--tp-comm-overlap, by stand-ins for torch's operators: the numbers of a run without it."""

import shlex
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_ext.forkserver.ranks import run_ranks

BASE = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --eval-interval 0 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 --cpu-gemm blas "
    "--tensor-model-parallel-size 2 --sequence-parallel"
)
FUSED = "--gradient-accumulation-fusion"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 24"
STEPS, MICROBATCHES, LAYERS = 2, 2, 2


def _trained(flags: str) -> tuple[list[Any], list[torch.Tensor], Counter[tuple[str, tuple[int, ...]]]]:
    """Losses and gradient norms of two steps, the weights after them, and the calls of the stand-ins."""
    from megatron_ext import device

    here = device.install("cpu")
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer
    from tests.support import symmetric_memory

    with symmetric_memory.on_cpu_ranks():
        run = build_run(configure(shlex.split(f"{BASE} {flags}")).config, here)
        trainer = Trainer(run, [])
        steps = [trainer.step() for _ in range(STEPS)]
    weights = [
        main.detach().clone() for part in run.sharding.parts(run.optimizer) for _, main in part.main_parameters()
    ]
    return [(step.loss, step.grad_norm) for step in steps], weights, Counter(symmetric_memory.calls)


def compared(world: int, flags: str) -> Counter[tuple[str, tuple[int, ...]]]:
    """Hold runs with and without the flag against each other, to the bit; return the calls of a rank."""
    plain, overlapped = (run_ranks(world, _trained, f"{flags} {flag}") for flag in ("", "--tp-comm-overlap"))
    for (expected, weights, none), (steps, also, _) in zip(plain, overlapped, strict=True):
        assert steps == expected
        assert all(map(torch.equal, also, weights))
        assert not none
    return overlapped[0][2]


def test_layers_overlap_with_the_numbers_of_plain_ones() -> None:
    """Both products of each block in both passes; slices have half of the 16 tokens, parts half of the channels."""
    calls = compared(2, FUSED)
    times = STEPS * MICROBATCHES * LAYERS
    assert calls == {
        ("fused_all_gather_matmul", (8, 2, 32)): times * (2 + 2),
        ("fused_matmul_reduce_scatter", (16, 2, 16)): times,  # of attention's output
        ("fused_matmul_reduce_scatter", (16, 2, 64)): times * (1 + 1),  # of the MLP, and gradients of its input
        ("fused_matmul_reduce_scatter", (16, 2, 48)): times,  # gradients of attention's input
    }


# Of the second tier: the case above has the same products.
@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, ""),
        (2, LLAMA),
        (2, f"{FUSED} {RECOMPUTED}"),
        (2, f"{LLAMA} {FUSED} --recompute-granularity selective --recompute-modules core_attn mlp layernorm"),
        (2, f"{FUSED} --bf16"),
        (4, f"{FUSED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (4, f"{FUSED} --pipeline-model-parallel-size 2"),
        (4, f"{LLAMA} --context-parallel-size 2"),
        (4, "--use-torch-fsdp2"),
        (2, f"{LLAMA} --untie-embeddings-and-output-weights --linear-cross-entropy"),
    ],
)
def test_other_layouts_overlap_with_the_numbers_of_plain_ones(world: int, flags: str) -> None:
    assert compared(world, flags)


@pytest.mark.full
@pytest.mark.parametrize("flags", [EXPERTS, f"{EXPERTS} --moe-token-dispatcher-type alltoall {FUSED}"])
def test_experts_communicate_as_ever(flags: str) -> None:
    """Attention overlaps; the tokens of experts, shared ones too, travel otherwise."""
    calls = compared(2, flags)
    times = STEPS * MICROBATCHES * LAYERS
    assert sum(calls.values()) == times * 4


def _on_a_cpu() -> list[str]:
    """Warnings of a run on CPU ranks without stand-ins, of rank 0, and whether a layer overlaps."""
    from megatron_ext import device, terminal

    here = device.install("cpu")
    from megatron_ext.config.resolve import Facts
    from megatron_ext.parts.linear.compute import ColumnLinear, RowLinear
    from megatron_ext.rules.warnings import warnings_of
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    told: list[str] = []
    terminal.warn = told.append  # pyright: ignore[reportAttributeAccessIssue]
    for device_flag in ("cpu", "auto"):
        flags = f"{BASE} --tp-comm-overlap".replace("--device cpu", f"--device {device_flag}")
        configured = configure(shlex.split(flags))
        told += warnings_of(configured.command_line.values, configured.config, Facts())
        run = build_run(configured.config, here)
        linears = [one for chunk in run.chunks for one in chunk.modules() if isinstance(one, ColumnLinear | RowLinear)]
        assert linears
        assert not any(one.overlaps for one in linears)
        from tests.support.several_models import end_layout

        end_layout()
    return [text for text in told if "overlap" in text]


def test_cpu_ranks_are_told_that_it_changes_nothing() -> None:
    first, second = run_ranks(2, _on_a_cpu)
    why = "processes have no symmetric memory"
    assert first == [
        f"--tp-comm-overlap changes nothing here: with --device cpu {why}, and products wait for what they send",
        f"--tp-comm-overlap changes nothing on rank 0 and its tensor-parallel ranks: CPU {why}",
    ]
    assert second == first[:1]
