"""A gated delta rule, and Mamba-2, on context-parallel ranks, each with two parts of every sample, against whole
samples, in fp64."""

import itertools
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.parity import CURVE_TOLERANCE
from tests.support.several_models import in_turn
from tests.support.small_models import DELTA, MAMBA, build_small_model, small_config

LENGTH, ROWS = 96, 2
BORDERS = (0, 1, 2, 3, 11, 12, 22, 47, 48, 50, 61, 70, 84, 95)
"""Where documents begin: within and at the border of a part, and some shorter than the convolution."""


Case = tuple[bool, int, int, str]
"""Whether there are documents, positions of the convolution and of a span, and the variant, or mamba."""


def _differences(size: int, case: Case) -> dict[str, float]:
    """The largest difference of output and gradients on this rank, over the largest number."""
    from megatron_ext.data.packing import documents_of
    from megatron_ext.parts.attention.cached import Sequences
    from megatron_ext.plugins.gated_delta import compute

    documents, kernel, compute.SPAN, variant = case
    sizes = MAMBA if variant == "mamba" else {**DELTA, "experimental_attention_variant": variant}
    sizes = {**sizes, "seq_length": LENGTH, "max_position_embeddings": LENGTH, "linear_conv_kernel_dim": kernel}
    [gpt], groups = build_small_model(small_config(sizes, {"context_parallel_size": size, "world_size": size}))
    layer: Any = gpt.decoder.layers[0].self_attention.double()
    rank = groups.cp.rank()
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(LENGTH, ROWS, 64, dtype=torch.float64, generator=generator) for _ in range(2))
    with torch.no_grad():
        for parameter in layer.parameters():  # slow decays, which reach over several parts
            parameter.mul_(0.3 if parameter is layer.A_log else 1.0)
        layer.dt_bias.copy_(torch.linspace(-3.5, -2.5, len(layer.dt_bias)))
    begins = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    begins[0, list(BORDERS)] = True
    begins[1, 33] = True

    def run(inputs: torch.Tensor, weights: torch.Tensor, cp: tuple[int, int]) -> list[torch.Tensor]:
        sequences = None
        if documents:
            sequences = Sequences(documents_of(torch.ones(ROWS, LENGTH, dtype=torch.int64), 0, *cp, begins_BS=begins))
        layer.zero_grad()
        leaf = inputs.clone().requires_grad_()
        output = layer(leaf, packed_seq_params=sequences)[0]
        (output * weights).sum().backward()
        assert leaf.grad is not None
        return [output.detach(), leaf.grad, *(one.grad.clone() for one in layer.parameters())]

    group, layer.cp_group = layer.cp_group, None
    whole = run(x, weight, (0, 1))
    layer.cp_group = group

    def part(of: torch.Tensor) -> torch.Tensor:
        chunks = of.chunk(2 * size)
        return torch.cat([chunks[index] for index in context_chunks(rank, size)])

    found = run(part(x), part(weight), (rank, size))
    for gradient in found[2:]:
        torch.distributed.all_reduce(gradient, group=groups.cp)
    names = ["output", "input", *(name for name, _ in layer.named_parameters())]
    expected = [part(whole[0]), part(whole[1]), *whole[2:]]
    pairs = zip(names, found, expected, strict=True)
    return {name: ((one - other).abs().max() / other.abs().max()).item() for name, one, other in pairs}


KINDS = ("gated_delta_net", "kda", "mamba")
# A convolution of one position takes nothing from other ranks, whatever the span.
CASES = [*itertools.product((False, True), (4,), (1024, 7), KINDS), *itertools.product((True,), (1,), (1024,), KINDS)]


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_samples_are_computed_as_whole_ones(size: int) -> None:
    """On two ranks, of which none has two neighbours, documents alone."""
    cases = [case for case in CASES if size == 4 or case[:2] == (True, 4)]
    for of_rank in run_ranks(size, in_turn, partial(_differences, size), cases):
        for case, differences in zip(cases, of_rank, strict=True):
            assert max(differences.values()) < 1e-10, (case, differences)


def _without_states_of_others(case: Case) -> dict[str, float]:
    from megatron_ext.plugins.gated_delta import compute
    from megatron_ext.plugins.mamba import compute as of_mamba

    compute.states = lambda maps, group: torch.zeros_like(maps[..., : -maps.size(-2)])
    of_mamba.states = lambda maps, *_: torch.zeros_like(maps[..., :-1])
    return _differences(2, case)


def _without_inputs_of_others(case: Case) -> dict[str, float]:
    from megatron_ext.plugins.gated_delta import compute

    compute.before_pieces = lambda last, group: torch.zeros_like(last)
    return _differences(2, case)


@pytest.mark.parametrize("fault", [_without_states_of_others, _without_inputs_of_others])
def test_what_other_ranks_give_is_needed(fault: Any) -> None:
    for of_rank in run_ranks(2, in_turn, fault, CASES[:3]):
        for case, differences in zip(CASES[:3], of_rank, strict=True):
            assert max(differences.values()) > 1e-3, case


def _losses(flags: str) -> list[float]:
    from megatron_ext.train.pretrain import pretrain

    return list(pretrain(shlex.split(flags)).losses)


@pytest.mark.full
@pytest.mark.parametrize("model", ["delta rules", "Kimi Linear", "OLMo hybrid", "Mamba-2 hybrid", "chosen keys"])
def test_a_run_goes_on_in_this_layout_and_in_others(model: str, tmp_path: Path) -> None:
    """With the optimizer's state of the convolution and of each head's numbers."""
    run = f"{RECIPE} --seq-length 16 --mock-data --vocab-size 250 --eval-interval 0 --device cpu --num-workers 0"
    flags = f"{run} --global-batch-size 4 {MODELS[model]}"
    [whole] = run_ranks(1, _losses, f"{flags} --exit-interval 4 --save {tmp_path} --save-interval 2")
    goes_on = f"{flags} --exit-interval 4 --load {tmp_path} --ckpt-step 2"
    [same] = run_ranks(1, _losses, goes_on)
    assert same == whole[2:]
    others = [
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        "--pipeline-model-parallel-size 2",
        *(["--use-torch-fsdp2"] if "--num-experts" not in flags else []),
    ]
    for layout in others:
        found = run_ranks(2, _losses, f"{goes_on} {layout}")[-1]
        assert found == pytest.approx(whole[2:], abs=CURVE_TOLERANCE)
