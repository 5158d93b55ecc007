"""Dropout on ranks: which masks are shared, and that recomputation draws the same ones again."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.verify.compared_layouts import RECOMPUTE
from megatron_ext.verify.compared_models import MODELS, RECIPE
from megatron_ext.verify.parity import SEQ_LENGTH, write_corpus
from megatron_ext.verify.ranks import run_ranks
from megatron_ext.verify.recorded_training import RunRecord, record
from tests.support.dropout_masks import DROPOUT, equal_masks, masks_of_first_step

LAYOUTS = {
    "one process": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}
RECOMPUTED_IN_EVERY_RUN = {("TP2 SP", "selective, all parts"), ("PP2 VPP2", "full uniform")}
STEPS = 2


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = write_corpus(Path(tmp_path_factory.mktemp("corpus")))
    return [*RECIPE.split(), *MODELS["tied"].split(), *DROPOUT.split(), *data]


def _share_dropped(masks: list[np.ndarray]) -> float:
    return 1.0 - np.concatenate([mask.ravel() for mask in masks]).mean()


def test_tensor_parallel_ranks_share_masks_of_what_they_hold_in_common(flags: list[str]) -> None:
    (hidden, attention), (other_hidden, other_attention) = run_ranks(
        2, masks_of_first_step, [*flags, *LAYOUTS["TP2"][1].split()]
    )
    # 4 microbatches of: the embedding, and two residual branches of each of 4 layers.
    assert len(hidden) == 4 * (1 + 2 * 4)
    assert len(attention) == 4 * 4
    assert all(equal_masks(hidden, other_hidden))
    assert not any(equal_masks(attention, other_attention)), "each rank holds other heads"
    assert _share_dropped(hidden) == pytest.approx(0.1, abs=0.01)


def test_sequence_parallel_ranks_draw_their_own_masks(flags: list[str]) -> None:
    (hidden, attention), (other_hidden, other_attention) = run_ranks(
        2, masks_of_first_step, [*flags, *LAYOUTS["TP2 SP"][1].split()]
    )
    assert {mask.shape[0] for mask in hidden} == {SEQ_LENGTH // 2}
    assert not any(equal_masks(hidden, other_hidden)), "each rank holds other tokens"
    assert not any(equal_masks(attention, other_attention)), "each rank holds other heads"


def test_data_parallel_ranks_draw_their_own_masks(flags: list[str]) -> None:
    (hidden, attention), (other_hidden, other_attention) = run_ranks(2, masks_of_first_step, flags)
    assert not any(equal_masks(hidden, other_hidden))
    assert not any(equal_masks(attention, other_attention))


def test_layers_and_microbatches_draw_their_own_masks(flags: list[str]) -> None:
    [(hidden, attention)] = run_ranks(1, masks_of_first_step, flags)
    for masks in (hidden, attention):
        assert len({mask.tobytes() for mask in masks}) == len(masks)


def test_the_seed_decides_the_masks(flags: list[str]) -> None:
    [(hidden, attention)] = run_ranks(1, masks_of_first_step, flags)
    [(again, attention_again)] = run_ranks(1, masks_of_first_step, flags)
    [(other, other_attention)] = run_ranks(1, masks_of_first_step, [*flags, "--seed", "7"])
    assert all(equal_masks(hidden, again))
    assert all(equal_masks(attention, attention_again))
    assert not any(equal_masks(hidden, other))
    assert not any(equal_masks(attention, other_attention))


@pytest.fixture(scope="module")
def without_recomputation(flags: list[str]) -> Callable[[str], RunRecord]:
    records: dict[str, RunRecord] = {}

    def get(layout: str) -> RunRecord:
        if layout not in records:
            world_size, layout_flags = LAYOUTS[layout]
            records[layout] = record([*flags, *layout_flags.split()], world_size, STEPS)
        return records[layout]

    return get


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        # In every run test_recompute.py has each way on one rank and under sequence parallelism.
        pytest.param(layout, mode, marks=[pytest.mark.slow] * ((layout, mode) not in RECOMPUTED_IN_EVERY_RUN))
        for layout in LAYOUTS
        for mode in RECOMPUTE
    ],
)
def test_recomputation_repeats_the_masks(
    layout: str, mode: str, flags: list[str], without_recomputation: Callable[[str], RunRecord]
) -> None:
    world_size, layout_flags = LAYOUTS[layout]
    expected = without_recomputation(layout)
    actual = record([*flags, *layout_flags.split(), *RECOMPUTE[mode].split()], world_size, STEPS)
    assert [loss.hex() for loss in actual.losses] == [loss.hex() for loss in expected.losses]
    for name, gradient in expected.gradients.items():
        assert np.array_equal(actual.gradients[name], gradient), name


def test_dropout_changes_the_loss(flags: list[str], without_recomputation: Callable[[str], RunRecord]) -> None:
    without_dropout = record([*flags, "--hidden-dropout", "0", "--attention-dropout", "0"], 1, 1)
    assert without_dropout.losses[0] != without_recomputation("one process").losses[0]
