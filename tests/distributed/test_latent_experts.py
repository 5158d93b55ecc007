"""Experts in a smaller width than the rest, and experts that are computed again in the backward pass: equal in every
layout, and what the formula says."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.program import run_program
from tests.support.small_models import LLAMA, build_small_model, small_config

# Of the second tier: a row of tests/parity/test_matrix.py has a latent width.
pytestmark = pytest.mark.full

MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --disable-bias-linear --swiglu
    --position-embedding-type rope --mock-data --vocab-size 61 --make-vocab-size-divisible-by 16 --seq-length 16
    --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-2 --lr-decay-style constant --hidden-dropout 0
    --attention-dropout 0 --eval-interval 0 --init-method-std 0.2 --log-interval 1 --num-experts 4
    --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 --moe-aux-loss-coeff 0.1
"""
LATENT = "--moe-latent-size 12"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def _steps(flags: str, folder: Path, ranks: int = 1) -> list[tuple[float, float, Any]]:
    """Loss, norm of the gradient and tokens of experts of each step."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    ended = run_ranks(ranks, run_program, shlex.split(f"{MODEL} {flags} --metrics-file {metrics}"))[-1]
    assert ended.code == 0, ended.errors
    rows = map(json.loads, metrics.read_text().splitlines())
    return [(row["lm_loss"], row["grad_norm"], row["expert_tokens"]) for row in rows]


@pytest.mark.parametrize(
    "again", ["--moe-layer-recompute", "--recompute-granularity selective --recompute-modules moe"]
)
def test_experts_that_are_computed_again_give_the_same_bits(again: str, tmp_path: Path) -> None:
    assert _steps(f"{LATENT} {again}", tmp_path) == _steps(LATENT, tmp_path)


def test_latent_experts_are_equal_in_every_layout(tmp_path: Path) -> None:
    known = _steps(LATENT, tmp_path)
    assert known != _steps("", tmp_path)
    for ranks, layout in (
        (
            2,
            f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {ALL_TO_ALL}",
        ),
        (4, f"{TP2} --pipeline-model-parallel-size 2 --recompute-activations"),
        (2, "--context-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer"),
        (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
    ):
        for one, other in zip(_steps(f"{LATENT} {layout}", tmp_path, ranks), known, strict=True):
            assert one[:2] == pytest.approx(other[:2], rel=1e-5), layout
            assert one[2] == other[2], layout


def _far_from_the_formula() -> tuple[float, int]:
    """Compare a layer's mixture with U sum_k w_k E_k(D x), in fp64; return also the parameters of the routed part."""
    model = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_latent_size": 12, "moe_router_topk": 2}
    [gpt], _ = build_small_model(small_config({**LLAMA, **model}))
    mixture: Any = gpt.decoder.layers[0].mlp.double()
    generator = torch.Generator().manual_seed(0)
    for weight in mixture.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
    hidden = mixture.router.weight.shape[1]
    x = torch.randn(5, 2, hidden, generator=generator, dtype=torch.float64)
    found, _ = mixture(x)
    logits = x @ mixture.router.weight.t()
    best = logits.topk(2, dim=-1)
    weights = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))
    down = x @ mixture.fc1_latent_proj.weight.t()
    expected = torch.zeros_like(down)
    fc1, fc2 = mixture.experts.linear_fc1.weight, mixture.experts.linear_fc2.weight
    for expert in range(4):
        gate, up = (down @ fc1[expert].t()).chunk(2, dim=-1)
        expected += weights[..., expert, None] * ((F.silu(gate) * up) @ fc2[expert].t())
    expected = expected @ mixture.fc2_latent_proj.weight.t()
    far = (found - expected).detach().abs().max() / expected.detach().abs().max()
    return float(far), sum(one.numel() for one in mixture.parameters())


def test_a_mixture_is_what_the_formula_says() -> None:
    [(far, parameters)] = run_ranks(1, _far_from_the_formula)
    assert far < 1e-5
    assert parameters == 4 * 64 + 2 * 12 * 64 + 4 * 3 * 24 * 12
