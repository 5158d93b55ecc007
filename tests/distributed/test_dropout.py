"""Dropout on ranks: which masks are shared; and recomputation draws the same ones again and changes no bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.schema import Config
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.names import global_named_parameters
from megatron_ext.plugins.prove.compared_layouts import RECOMPUTE
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.parity import SEQ_LENGTH, write_corpus
from megatron_ext.plugins.prove.recorded_training import record
from tests.support.dropout_masks import DROPOUT, equal_masks, masks_of_first_step
from tests.support.selection import marked
from tests.support.several_models import in_turn
from tests.support.small_models import LLAMA, build_small_model, small_config

TP2, SP = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
MASKS = {
    1: {"alone": "", "again": "", "another seed": "--seed 7"},
    2: {"DP2": "", "TP2": TP2, "TP2 SP": SP, "CP2": "--context-parallel-size 2 --cp-comm-type a2a"},
}
"""Flags by number of ranks and name."""
Masks = dict[str, list[tuple[list[np.ndarray], list[np.ndarray]]]]
"""Masks of hidden states and of attention in the first step, of each rank, by name."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = write_corpus(Path(tmp_path_factory.mktemp("corpus")))
    return [*RECIPE.split(), *MODELS["tied"].split(), *DROPOUT.split(), *data]


@pytest.fixture(scope="module")
def masks(flags: list[str]) -> Masks:
    found = {}
    for ranks, cases in MASKS.items():
        by_rank = run_ranks(ranks, in_turn, masks_of_first_step, [[*flags, *more.split()] for more in cases.values()])
        found |= dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    return found


def _share_dropped(masks: list[np.ndarray]) -> float:
    return 1.0 - np.concatenate([mask.ravel() for mask in masks]).mean()


def test_tensor_parallel_ranks_share_masks_of_what_they_hold_in_common(masks: Masks) -> None:
    (hidden, attention), (other_hidden, other_attention) = masks["TP2"]
    # 4 microbatches of: the embedding, and two residual branches of each of 4 layers.
    assert len(hidden) == 4 * (1 + 2 * 4)
    assert len(attention) == 4 * 4
    assert all(equal_masks(hidden, other_hidden))
    assert not any(equal_masks(attention, other_attention)), "each rank holds other heads"
    assert _share_dropped(hidden) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("layout", ["TP2 SP", "CP2", "DP2"])
def test_ranks_that_hold_other_tokens_draw_their_own_masks(layout: str, masks: Masks) -> None:
    (hidden, attention), (other_hidden, other_attention) = masks[layout]
    held = SEQ_LENGTH if layout == "DP2" else SEQ_LENGTH // 2
    assert {mask.shape[0] for mask in hidden} == {held}
    assert not any(equal_masks(hidden, other_hidden))
    assert not any(equal_masks(attention, other_attention))
    assert {np.shape(mask)[1] for mask in attention} == {2 if layout == "DP2" else 1}, "each rank holds other heads"


def test_layers_and_microbatches_draw_their_own_masks_and_the_seed_decides_them(masks: Masks) -> None:
    [alone], [again], [other] = (masks[name] for name in MASKS[1])
    for kind in (0, 1):
        assert len({mask.tobytes() for mask in alone[kind]}) == len(alone[kind])
        assert all(equal_masks(alone[kind], again[kind]))
        assert not any(equal_masks(alone[kind], other[kind]))


RECOMPUTED = {
    "one process": (1, ""),
    "TP2": (2, TP2),
    "TP2 SP": (2, SP),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        # The others are slow: below is each way on one rank and under sequence parallelism.
        pytest.param(layout, mode, marks=[pytest.mark.slow] * ((layout, mode) != ("PP2 VPP2", "full uniform")))
        for layout in RECOMPUTED
        for mode in RECOMPUTE
    ],
)
def test_recomputation_repeats_the_masks(layout: str, mode: str, flags: list[str]) -> None:
    world_size, layout_flags = RECOMPUTED[layout]
    expected, actual = (
        record([*flags, *layout_flags.split(), *how.split()], world_size, 2) for how in ("", RECOMPUTE[mode])
    )
    assert [loss.hex() for loss in actual.losses] == [loss.hex() for loss in expected.losses]
    for name, gradient in expected.gradients.items():
        assert np.array_equal(actual.gradients[name], gradient), name


GPT2 = {"num_layers": 3, "attention_dropout": 0.1, "hidden_dropout": 0.1}
OF_TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
OF_SP = {**OF_TP2, "sequence_parallel": True}
METHODS: dict[str, dict[str, Any]] = {
    "selective": {"recompute_granularity": "selective"},
    "mlp, layernorm": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "GPT-2": (GPT2, {}, {}),
    "GPT-2, TP2": (GPT2, OF_TP2, {}),
    "GPT-2, TP2 SP": (GPT2, OF_SP, {}),
    "Llama": ({**LLAMA, **GPT2}, {}, {}),
    "Llama, TP2": ({**LLAMA, **GPT2}, OF_TP2, {}),
    "Llama, TP2 SP": ({**LLAMA, **GPT2}, OF_SP, {}),
    # Scales are found again, together with the other ranks.
    "Llama in FP8, TP2 SP": ({**LLAMA, **GPT2}, OF_SP, {"fp8_format": "hybrid", "fp8_recipe": "rowwise"}),
}
"""Model, layout and training."""


def _loss_and_gradients(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    [gpt], _ = build_small_model(config)
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = gpt(tokens[:, :-1], torch.arange(16).expand(2, 16), labels=tokens[:, 1:])
    losses.sum().backward()
    return losses.detach(), {name: tensor.grad for name, tensor in global_named_parameters([gpt])}


# Slow: sequence parallelism divides more of the same.
@pytest.mark.first("GPT-2, TP2 SP")
@pytest.mark.parametrize("case", marked(CASES, slow={"GPT-2, TP2", "Llama, TP2"}))
def test_recompute_is_bitwise_the_same(case: str) -> None:
    model, divided, training = CASES[case]
    size = divided.get("tensor_model_parallel_size", 1)
    layout = {**divided, "world_size": size}
    others = [small_config({**model, name: 0.0}, layout, training) for name in ("attention_dropout", "hidden_dropout")]
    others += [small_config(model, layout)] if training else []
    ways = [small_config(model, layout, {**training, **method}) for method in ({}, *METHODS.values())]
    for found in run_ranks(size, in_turn, _loss_and_gradients, [*others, *ways]):
        (loss, gradients), *recomputed = found[len(others) :]
        assert not any(torch.equal(loss, other) for other, _ in found[: len(others)]), "dropout, and FP8, count"
        for method, got in zip(METHODS, recomputed, strict=True):
            assert torch.equal(got[0], loss), method
            for name, gradient in got[1].items():
                assert torch.equal(gradient, gradients[name]), (method, name)
