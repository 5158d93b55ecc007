"""Dropout on ranks: which masks are shared, and that recomputation draws the same ones again.

The masks are those of a real forward pass of the whole model. `_MaskRecorder` stands between the model and torch's
two operations with dropout, and runs each of them twice from the same state of the generator: once on values that
show the mask, and once as the model asked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_ext.verify.cases import MODELS, RECIPE, RECOMPUTE
from megatron_ext.verify.corpus import SEQ_LENGTH, write_corpus
from megatron_ext.verify.ranks import run_ranks
from megatron_ext.verify.record import RunRecord, record

# The last of two flags counts. Heads of 32 channels are as long as a sample, so that an identity fits as values.
DROPOUT = "--num-attention-heads 2 --hidden-dropout 0.1 --attention-dropout 0.1"
LAYOUTS = {
    "one process": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}
STEPS = 4


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = write_corpus(Path(tmp_path_factory.mktemp("corpus")))
    return [*RECIPE.split(), *MODELS["tied"].split(), *DROPOUT.split(), *data]


class _MaskRecorder:
    """Collects the masks of every dropout in order: hidden ones and those of attention."""

    def __init__(self) -> None:
        self.hidden: list[np.ndarray] = []
        self.attention: list[np.ndarray] = []
        self._dropout, self._attend = F.dropout, F.scaled_dot_product_attention
        F.dropout, F.scaled_dot_product_attention = self._on_dropout, self._on_attention  # pyright: ignore

    def _on_dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0.0:
            self.hidden.append(_twice(lambda: self._dropout(torch.ones_like(x), p)))
        return self._dropout(x, p, training, inplace)

    def _on_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        if options.get("dropout_p", 0.0) > 0.0:
            identity = torch.eye(value.size(-2), value.size(-1)).expand_as(value)
            self.attention.append(
                _twice(lambda: self._attend(torch.zeros_like(query), torch.zeros_like(key), identity, **options))
            )
        return self._attend(query, key, value, **options)


def _twice(show: Callable[[], torch.Tensor]) -> np.ndarray:
    """What survives in `show`, with the generator left as it was."""
    state = torch.get_rng_state()
    with torch.no_grad():
        survives = (show() != 0.0).numpy()
    torch.set_rng_state(state)
    return survives


def _masks_of_first_step(flags: list[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure([*flags, "--device", "cpu"]).config, device.install("cpu"))
    recorder = _MaskRecorder()
    Trainer(run, []).step()
    return recorder.hidden, recorder.attention


def _equal(masks: list[np.ndarray], others: list[np.ndarray]) -> list[bool]:
    assert len(masks) == len(others) > 0
    return [np.array_equal(mask, other) for mask, other in zip(masks, others, strict=True)]


def _share_dropped(masks: list[np.ndarray]) -> float:
    return 1.0 - np.concatenate([mask.ravel() for mask in masks]).mean()


def test_tensor_parallel_ranks_share_masks_of_what_they_hold_in_common(flags: list[str]) -> None:
    (hidden, attention), (other_hidden, other_attention) = run_ranks(
        2, _masks_of_first_step, [*flags, *LAYOUTS["TP2"][1].split()]
    )
    # 4 microbatches of: the embedding, and two residual branches of each of 4 layers.
    assert len(hidden) == 4 * (1 + 2 * 4)
    assert len(attention) == 4 * 4
    assert all(_equal(hidden, other_hidden))
    assert not any(_equal(attention, other_attention)), "each rank holds other heads"
    assert _share_dropped(hidden) == pytest.approx(0.1, abs=0.01)


def test_sequence_parallel_ranks_draw_their_own_masks(flags: list[str]) -> None:
    (hidden, attention), (other_hidden, other_attention) = run_ranks(
        2, _masks_of_first_step, [*flags, *LAYOUTS["TP2 SP"][1].split()]
    )
    assert {mask.shape[0] for mask in hidden} == {SEQ_LENGTH // 2}
    assert not any(_equal(hidden, other_hidden)), "each rank holds other tokens"
    assert not any(_equal(attention, other_attention)), "each rank holds other heads"


def test_data_parallel_ranks_draw_their_own_masks(flags: list[str]) -> None:
    (hidden, attention), (other_hidden, other_attention) = run_ranks(2, _masks_of_first_step, flags)
    assert not any(_equal(hidden, other_hidden))
    assert not any(_equal(attention, other_attention))


def test_layers_and_microbatches_draw_their_own_masks(flags: list[str]) -> None:
    [(hidden, attention)] = run_ranks(1, _masks_of_first_step, flags)
    for masks in (hidden, attention):
        assert len({mask.tobytes() for mask in masks}) == len(masks)


def test_the_seed_decides_the_masks(flags: list[str]) -> None:
    [(hidden, attention)] = run_ranks(1, _masks_of_first_step, flags)
    [(again, attention_again)] = run_ranks(1, _masks_of_first_step, flags)
    [(other, other_attention)] = run_ranks(1, _masks_of_first_step, [*flags, "--seed", "7"])
    assert all(_equal(hidden, again))
    assert all(_equal(attention, attention_again))
    assert not any(_equal(hidden, other))
    assert not any(_equal(attention, other_attention))


@pytest.fixture(scope="module")
def without_recomputation(flags: list[str]) -> Callable[[str], RunRecord]:
    records: dict[str, RunRecord] = {}

    def get(layout: str) -> RunRecord:
        if layout not in records:
            world_size, layout_flags = LAYOUTS[layout]
            records[layout] = record([*flags, *layout_flags.split()], world_size, STEPS)
        return records[layout]

    return get


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("layout", LAYOUTS)
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
