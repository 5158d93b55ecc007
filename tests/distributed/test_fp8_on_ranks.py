"""Eight and four bits in all layouts: the same numbers are rounded by the same scales, alone and divided.

Rounding hides a difference of 1e-7 but where the middle between two numbers of the format lies in it: there it becomes
a sixteenth, and so on in the next layer. A layer is therefore compared exactly, and a curve with how far the format
takes it from the one without, as a curve in bf16 is with fp32.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.low_precision.formats import E5M2, recipe
from megatron_ext.plugins.low_precision.linear import Multiplication, linear
from megatron_ext.plugins.low_precision.random_numbers import Draw, Places
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.parity import (
    BF16_FACTOR,
    FIRST_LOSS_TOLERANCE,
    GRADIENT_TOLERANCE,
    compare,
    write_corpus,
)
from megatron_ext.plugins.prove.recorded_training import RunRecord, record

# Of the second tier: tests/plugins/low_precision computes the products.
pytestmark = pytest.mark.full

TOKENS, INPUTS, OUTPUTS = 512, 256, 512
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp4", "nvfp4")
OF_BLOCKS = ("blockwise", "mxfp8", "mxfp4")
"""Recipes whose scales are for blocks alone."""

FUSION = "--gradient-accumulation-fusion"
TP2 = "--tensor-model-parallel-size 2"


def _whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and gradient of a layer; in each the second half is 8 times the first, down and across."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for rows, columns in ((TOKENS, INPUTS), (OUTPUTS, INPUTS), (TOKENS, OUTPUTS)):
        matrix = torch.randn(rows, columns, generator=generator)
        matrix[rows // 2 :] *= 8
        matrix[:, columns // 2 :] *= 8
        made.append(matrix)
    return made[0], made[1], made[2]


def _products(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, how: Multiplication
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = x.unsqueeze(1).clone().requires_grad_(), weight.clone().requires_grad_()
    y = linear(x, weight, how)
    y.backward(grad.unsqueeze(1))
    assert x.grad is not None
    assert weight.grad is not None
    return y.detach().squeeze(1), x.grad.squeeze(1), weight.grad


def _distances(name: str, told: bool) -> dict[str, float]:
    """Largest distance of each product of this rank's part from the same part of one process's, over its size."""
    group: Any = torch.distributed.group.WORLD
    rank = group.rank()
    x, weight, grad = _whole()
    draw = Draw(1, "weight")
    how = Multiplication(recipe(name, E5M2), draw=draw)
    y, for_x, for_weight = _products(x, weight, grad, how)

    def half(matrix: torch.Tensor, dim: int) -> torch.Tensor:
        return matrix.chunk(2, dim)[rank]

    over = [group] if told else []
    own = Places(rank, 2) if told else Places()
    by_output, by_token = replace(how, draw=replace(draw, columns=own)), replace(how, draw=replace(draw, rows=own))
    found = {}
    column = replace(by_output, outputs_over=over, sums_over=group)
    found["outputs"] = (
        _products(x, half(weight, 0), half(grad, 1), column),
        (half(y, 1), for_x, half(for_weight, 0)),
    )
    gathers = replace(by_output, outputs_over=over, gathers_over=group)
    found["outputs, sequence"] = (
        _products(half(x, 0), half(weight, 0), half(grad, 1), gathers),
        (half(y, 1), half(for_x, 0), half(for_weight, 0)),
    )
    part_of_y, *of_row = _products(half(x, 1), half(weight, 1), grad, replace(how, inputs_over=over))
    torch.distributed.all_reduce(part_of_y)
    found["inputs"] = ((part_of_y, *of_row), (y, half(for_x, 1), half(for_weight, 1)))
    of_y, of_x, part = _products(half(x, 0), weight, half(grad, 0), replace(by_token, tokens_over=over))
    torch.distributed.all_reduce(part)
    found["tokens"] = ((of_y, of_x, part), (half(y, 0), half(for_x, 0), for_weight))
    return {
        name: max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(*both, strict=True))
        for name, both in found.items()
    }


def _all_distances(recipes: list[str]) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    torch.distributed.init_process_group("gloo")
    return {name: (_distances(name, told=True), _distances(name, told=False)) for name in recipes}


def test_a_divided_layer_rounds_as_the_whole_one() -> None:
    """Ranks that each take their own part's largest values, or draw as if they had all, round otherwise, but for
    blocks, which nobody divides."""
    for found in run_ranks(2, _all_distances, list(RECIPES)):
        for name, (told, alone) in found.items():
            assert max(told.values()) < 1e-6, (name, told)  # sums in another order
            assert name in OF_BLOCKS or min(alone.values()) > 1e-4, (name, alone)


LAYOUTS = {
    "TP2": (2, TP2),
    "TP2 SP": (2, f"{TP2} --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "DP2 overlapped": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "TP2, fused gradients": (2, f"{TP2} {FUSION}"),
    "FSDP2": (2, "--use-torch-fsdp2"),
    "Megatron-FSDP": (2, "--use-megatron-fsdp"),
}
EXPERTS_OF_RANKS = "--expert-model-parallel-size 2"
OF_EXPERTS = {
    "EP2": (2, EXPERTS_OF_RANKS),
    "EP2, gathered": (2, f"{EXPERTS_OF_RANKS} --moe-token-dispatcher-type allgather"),
    "TP2 SP": (2, f"{TP2} --sequence-parallel"),
    "TP2 SP, EP2 ETP1": (2, f"{TP2} --sequence-parallel {EXPERTS_OF_RANKS} --expert-tensor-parallel-size 1"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "DP2 overlapped": LAYOUTS["DP2 overlapped"],
    "EP2 PP2": (4, f"{EXPERTS_OF_RANKS} --pipeline-model-parallel-size 2"),
}
OF_WHOLE_LAYERS = ("PP2", "DP2 overlapped", "FSDP2", "EP2", "EP2, gathered", "EP2 PP2")
"""Layouts that divide no product, and so no sum before it is rounded."""

_EXPERTS = "--num-layers 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64"
_LATENTS = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16"
SHAPES = {
    "dense": (f"{MODELS['learned positions, biases']} --num-layers 2", LAYOUTS),
    "experts": (f"{MODELS['experts']} {_EXPERTS}", OF_EXPERTS),
    "latents and a depth": (
        f"--num-layers 2 --position-embedding-type rope --swiglu --disable-bias-linear {_LATENTS} --v-head-dim 16 "
        "--untie-embeddings-and-output-weights --mtp-num-layers 1",
        LAYOUTS,
    ),
}
"""Flags of a model, and the layouts to compare it in."""

FORMATS = {
    **{name: f"--fp8-format hybrid --fp8-recipe {name}" for name in ("tensorwise", "rowwise", "mxfp8")},
    **{name: f"--fp4-format e2m1 --fp4-recipe {name}" for name in ("mxfp4", "nvfp4")},
}
PLAIN_RUN = {
    *(("dense", *pair) for pair in (("tensorwise", "TP2 SP"), ("rowwise", "CP2"), ("rowwise", "TP2, fused gradients"))),
    *(("dense", *pair) for pair in (("tensorwise", "FSDP2"), ("nvfp4", "TP2 SP"))),
    *(("experts", *pair) for pair in (("mxfp8", "EP2"), ("tensorwise", "EP2, gathered"), ("nvfp4", "EP2"))),
    ("experts", "rowwise", "TP2 SP, EP2 ETP1"),
    ("latents and a depth", "tensorwise", "PP2"),
}
STEPS = 4


class Curves:
    """Runs of small models, each of one process once."""

    def __init__(self, folder: Path) -> None:
        self.data = write_corpus(folder)
        self.alone: dict[tuple[str, str], RunRecord] = {}

    def run(self, shape: str, flags: str, ranks: int = 1) -> RunRecord:
        smaller = f"--ffn-hidden-size 128 --eval-interval 0 {flags}"
        words = [*RECIPE.split(), *SHAPES[shape][0].split(), *self.data, *smaller.split()]
        if ranks > 1:
            return record(words, ranks, STEPS)
        if (shape, flags) not in self.alone:
            self.alone[shape, flags] = record(words, 1, STEPS)
        return self.alone[shape, flags]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return Curves(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("shape", "name", "layout"),
    [
        # The others are slow: a layer's numbers above have each recipe under each way to divide it.
        pytest.param(*row, marks=[] if row in PLAIN_RUN else [pytest.mark.slow])
        for row in ((shape, name, layout) for shape in SHAPES for name in FORMATS for layout in SHAPES[shape][1])
        # The dense model has the other layouts.
        if row[0] != "latents and a depth" or row[2] in ("PP2", "TP2 SP", "DP2 overlapped")
    ],
)
def test_a_layout_has_the_curve_of_one_process(shape: str, name: str, layout: str, curves: Curves) -> None:
    ranks, flags = SHAPES[shape][1][layout]
    # Each of a context-parallel rank's two chunks has whole blocks of tokens.
    longer = "--seq-length 128" if layout == "CP2" and recipe(name, E5M2).summed_block is not None else ""
    without, alone = curves.run(shape, longer), curves.run(shape, f"{FORMATS[name]} {longer}".strip())
    run = curves.run(shape, f"{FORMATS[name]} {longer} {flags}", ranks)
    found, apart = compare(alone, run), compare(without, alone)
    assert not found.weights
    assert not found.flaws
    if layout in OF_WHOLE_LAYERS:
        assert found.first_loss <= FIRST_LOSS_TOLERANCE
        assert max(found.gradients.values()) <= GRADIENT_TOLERANCE
    assert found.gradients[found.worst_gradient] <= apart.gradients[apart.worst_gradient]
    assert found.loss <= BF16_FACTOR * apart.loss
