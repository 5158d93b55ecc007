"""Ten draws agree with one process in every test run; other tiers try more, and plant faults.

The ten are the first of seed 51. The sixty of the second tier have the date for their seed, so that each day tries
others; a failure names the seed and the draw. The five hundred of the slow tests are the first of seed 500.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megatron_ext.plugins.prove.draws import ONE_PROCESS, Draw, Draws, Layout, draw
from megatron_ext.plugins.prove.parity import write_corpus
from megatron_ext.plugins.prove.trials import Trials
from tests.support import planted_faults as planted

TODAY = int(datetime.now(UTC).strftime("%Y%m%d"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


@pytest.fixture(scope="module")
def data(folder: Path) -> list[str]:
    return write_corpus(folder, 5)


@pytest.fixture(scope="module")
def trials(folder: Path, data: list[str]) -> Trials:
    return Trials(folder, data)


@pytest.mark.parametrize("number", range(10))
def test_a_draw_agrees_with_one_process(number: int, trials: Trials, data: list[str]) -> None:
    verdict = trials.verdict(draw(Draws(51, data), number))
    assert not verdict.problems or verdict.is_rounding, verdict


# Of the second tier: the ten above try as much of everything as they can.
@pytest.mark.full
@pytest.mark.parametrize("number", range(60))
def test_a_draw_of_the_day_agrees_with_one_process(number: int, trials: Trials, data: list[str]) -> None:
    verdict = trials.verdict(draw(Draws(TODAY, data), number))
    assert not verdict.problems or verdict.is_rounding, (TODAY, number, verdict)


# Slow: the ten and the sixty above.
@pytest.mark.slow
def test_draws_agree_with_one_process(trials: Trials, data: list[str]) -> None:
    draws, found = Draws(500, data), {}
    for number in range(500):
        verdict = trials.verdict(draw(draws, number))
        if verdict.problems and not verdict.is_rounding:
            found[number] = verdict
    assert found == {}


SMALL = (
    "--hidden-size 32 --num-attention-heads 4 --init-method-std 0.1 --train-iters 20 --lr 1e-3 --lr-warmup-iters 10",
    "--lr-warmup-init 1e-4 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --num-layers 2",
    "--micro-batch-size 1 --global-batch-size 4 --normalization RMSNorm --disable-bias-linear",
)


def test_a_fault_of_a_layout_is_no_rounding(folder: Path, data: list[str]) -> None:
    drawn = Draw(SMALL, Layout(2, ("--tensor-model-parallel-size 2 --sequence-parallel",)), ONE_PROCESS)
    verdict = Trials(folder / "planted", data, planted.forget_sequence_parallel_mark).verdict(drawn)
    assert any("input_layernorm" in problem or "final_layernorm" in problem for problem in verdict.problems)
    assert not verdict.is_rounding


def test_a_state_that_is_resumed_otherwise_is_found(folder: Path, data: list[str]) -> None:
    """Each rank's own momentum: two steps, of which the first does not depend on it, in each of two layouts."""
    drawn = Draw((*SMALL, "--optimizer muon"), Layout(2, ()), Layout(2, ("--use-distributed-optimizer",)))
    verdict = Trials(folder / "planted", data, planted.give_every_rank_its_own_momentum).verdict(drawn)
    assert verdict.problems
    assert not verdict.is_rounding


FAULTS = (
    planted.shift_qkv,
    planted.forget_sequence_parallel_mark,
    planted.keep_the_gradient_of_shared_keys_apart,
    planted.move_the_bias_by_local_counts,
    planted.choose_groups_by_another_rank,
    planted.scale_weights_of_experts_twice,
    planted.skip_tied_embedding_reduction,
    planted.read_tied_weights_before_their_gather,
    planted.read_convolutions_before_their_gather,
    planted.average_per_microbatch,
    planted.count_tokens_of_own_rank_only,
    planted.scale_depths_by_counts_of_own_rank,
    planted.batch_sends_between_two_stages,
    planted.double_the_gradient_of_one_expert,
    planted.add_the_bias_of_experts_on_every_rank,
    planted.weigh_no_bias_of_an_expert,
    planted.keep_what_another_rank_would,
    planted.give_each_rank_two_neighbouring_chunks,
    planted.turn_the_ring_around,
    planted.average_over_ranks,
    planted.multiply_nothing_on_the_last_stage,
    planted.add_the_bias_of_attention_on_every_rank,
    planted.give_every_rank_the_slopes_of_the_first,
    planted.count_positions_from_each_chunk,
    planted.leave_out_the_sink_of_the_ring,
    planted.gate_heads_in_the_order_of_the_last,
    planted.leave_parts_of_the_momentum_on_their_ranks,
    planted.leave_rows_of_the_momentum_on_their_ranks,
    planted.take_means_of_parts,
    planted.bound_the_products_of_own_tokens,
    planted.look_at_the_keys_of_own_positions,
    planted.rescale_rows_of_another_rank,
    planted.give_every_rank_its_own_momentum,
)
"""Faults of layouts: those of one process alone would need no second layout to be seen."""


# Slow: the two planted above are found in every run.
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_drawing(fault: Callable[[], None], folder: Path, data: list[str]) -> None:
    """Within 300 draws; benchmarks/results/parity_fuzz.json has after how many."""
    draws, sabotaged = Draws(300, data), Trials(folder / "planted", data, fault)
    for number in range(300):
        verdict = sabotaged.verdict(replace(draw(draws, number), kill=None))
        if verdict.problems and not verdict.is_rounding:
            print(f"{fault.__name__}: found by draw {number + 1}")
            return
    raise AssertionError(f"{fault.__name__} was not found in 300 draws")
