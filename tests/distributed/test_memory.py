"""Bytes of weights, gradients and optimizer state per rank after a step, against the formulas.

Per parameter (Rajbhandari et al. 2020, arXiv:1910.02054, section 3, with Megatron's fp32 gradients) fp32 training
keeps 4 + 4 + 8 bytes, bf16 2 + 4 + 12. The distributed optimizer (ZeRO-1) divides the last by the data-parallel size.
"""

from typing import Any

import pytest
import torch

from benchmarks.memory import Bytes, bytes_per_rank
from megatron_ext.cost.memory import over_time
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.state_bytes import state_bytes
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parts.catalogue import count
from megatron_ext.train.configure import configure
from tests.support.checkpoints import build, train
from tests.support.selection import chosen, marked
from tests.support.several_models import end_layout

# Of the second tier: tests/unit/cost counts the bytes.
pytestmark = pytest.mark.full

BASE = (
    "--device cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --vocab-size 512 --eval-interval 0 "
)
BF16, FP32 = (2, 4, 12), (4, 4, 8)
"""Bytes per parameter: weights, gradients, optimizer."""
BF16_LION = (2, 4, 8)
"""One moment less."""


Measured = tuple[int, Bytes, tuple[float, float, float]]
"""The number of parameters, the bytes after a step, and those of a parameter by --dry-run."""


def _bytes(runs: list[str]) -> list[Measured]:
    found = []
    for flags in runs:
        run = build((BASE + flags).split())
        train(run, 1)
        found.append((count(run.config), bytes_per_rank(run), state_bytes(run.config).sizes))
        run.loaders.close()
        end_layout()
    return found


_SPLIT = (
    "--use-torch-fsdp2 --bf16 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
    "--position-embedding-type rope --pipeline-schedule"
)


def _whole_gradients() -> tuple[int, float]:
    """The bytes of whole gradients when a step's last pass is done, and what the planner has for them."""
    run = build((BASE + f"{_SPLIT} interleaved-zero-bubble").split())
    weights: list[torch.Tensor] = []
    held: list[int] = []
    for chunk in run.chunks:
        chunk.when_gathered(lambda _, weight: weights.append(weight))  # type: ignore[attr-defined]
    finalize = run.transformer_config.finalize_model_grads_func
    assert finalize is not None

    def count_and_finalize(*arguments: Any, **settings: Any) -> None:
        held.append(sum(weight.grad.nbytes for weight in weights if weight.grad is not None))
        finalize(*arguments, **settings)

    run.transformer_config.finalize_model_grads_func = count_and_finalize
    train(run, 1)
    plain, shapes = configure((BASE + f"{_SPLIT} looped-bfs").split()).config, Shapes(run.config)
    split, whole = (
        over_time(config, run.groups.pp.rank(), Shapes(config), fused=False).always for config in (run.config, plain)
    )
    run.loaders.close()
    end_layout()
    return held[0], split - whole + 4 * shapes.largest_layer


def test_whole_gradients_of_split_backward_passes_are_planned() -> None:
    for held, planned in run_ranks(4, _whole_gradients):
        assert held == pytest.approx(planned, rel=1e-12)


_MEGATRON_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
RUNS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "--bf16": (BF16, (1, 1, 1)),
    "--use-distributed-optimizer --bf16": (BF16, (1, 1, 4)),
    "--use-distributed-optimizer --bf16 --num-distributed-optimizer-instances 2": (BF16, (1, 1, 2)),
    # The shards are the masters.
    "--use-torch-fsdp2 --bf16": (FP32, (4, 4, 4)),
    "--use-torch-fsdp2 --bf16 --num-distributed-optimizer-instances 2": (FP32, (2, 2, 2)),
    f"{_MEGATRON_FSDP} optim_grads_params --bf16": (BF16, (4, 4, 4)),
    "--use-distributed-optimizer --bf16 --optimizer lion": (BF16_LION, (1, 1, 4)),
}
"""By flags: bytes per parameter, and by what 4 ranks divide them."""
REPEATED = {
    "": (FP32, (1, 1, 1)),
    "--use-distributed-optimizer": (FP32, (1, 1, 4)),
    "--use-torch-fsdp2": (FP32, (4, 4, 4)),
    f"{_MEGATRON_FSDP} no_shard --bf16": (BF16, (1, 1, 1)),
    f"{_MEGATRON_FSDP} optim --bf16": (BF16, (1, 1, 4)),
    f"{_MEGATRON_FSDP} optim_grads --bf16": (BF16, (1, 4, 4)),
    f"{_MEGATRON_FSDP} optim_grads_params --bf16 --untie-embeddings-and-output-weights": (BF16, (4, 4, 4)),
    f"{_MEGATRON_FSDP} optim_grads_params --bf16 --optimizer lion": (BF16_LION, (4, 4, 4)),
}
"""What others hold too: fp32 of a scheme, less sharding by another, untied weights, Lion twice. Left to --all."""


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, list[Measured]]:
    asked = chosen(request, "flags")
    ranks = run_ranks(4, _bytes, asked)
    return {flags: [rank[index] for rank in ranks] for index, flags in enumerate(asked)}


@pytest.mark.parametrize("flags", marked(RUNS | REPEATED, slow=REPEATED))
def test_bytes_shrink_as_the_formula_says(flags: str, measured: dict[str, list[Measured]]) -> None:
    per_parameter, divisors = (RUNS | REPEATED)[flags]
    for parameters, found, formula in measured[flags]:
        expected = [parameters * size / parts for size, parts in zip(per_parameter, divisors, strict=True)]
        assert [parameters * size for size in formula] == pytest.approx(expected)
        assert [found.weights, found.gradients, found.optimizer] == pytest.approx(expected, rel=0.02)
