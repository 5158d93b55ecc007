"""Ten draws agree with one process in every test run; other tiers try more, and plant faults.

The ten are the first of seed 51. The sixty of the second tier have the date for their seed, so that each day tries
others; a failure names the seed and the draw. The five hundred of the slow tests are the first of seed 500.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megatron_ext.plugins.huggingface import exporter
from megatron_ext.plugins.prove.draws import ONE_PROCESS, Draw, Draws, Layout, draw
from megatron_ext.plugins.prove.parity import write_corpus
from megatron_ext.plugins.prove.trials import Trials, Verdict
from tests.support import faults_found
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


def test_a_parameter_without_a_gradient_but_rounding_may_go_where_it_likes(folder: Path, data: list[str]) -> None:
    """Without rotation the bias of a key's norm adds the same to all scores of a query, which the softmax takes out; a
    fault in it would be no rounding."""
    biased = (*SMALL, "--position-embedding-type none --normalization LayerNorm --qk-layernorm --optimizer adam")
    drawn = Draw(biased, Layout(2, ("--tensor-model-parallel-size 2",)), ONE_PROCESS)
    verdict = Trials(folder / "silent", data).verdict(drawn)
    assert any("k_layernorm.bias" in problem for problem in verdict.problems)
    assert verdict.is_rounding
    verdict = Trials(folder / "planted", data, planted.forget_sequence_parallel_mark).verdict(
        Draw(biased, Layout(2, ("--tensor-model-parallel-size 2 --sequence-parallel",)), ONE_PROCESS)
    )
    assert not verdict.is_rounding


def test_a_state_that_is_resumed_otherwise_is_found(folder: Path, data: list[str]) -> None:
    """Each rank's own momentum: two steps, of which the first does not depend on it, in each of two layouts."""
    drawn = Draw((*SMALL, "--optimizer muon"), Layout(2, ()), Layout(2, ("--use-distributed-optimizer",)))
    verdict = Trials(folder / "planted", data, planted.give_every_rank_its_own_momentum).verdict(drawn)
    assert verdict.problems
    assert not verdict.is_rounding


LLAMA = (*SMALL, "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --norm-epsilon 1e-3")


def test_an_export_is_what_was_trained(folder: Path, data: list[str]) -> None:
    halves = Layout(2, ("--tensor-model-parallel-size 2 --sequence-parallel",))
    assert Trials(folder / "exports", data).verdict(Draw(LLAMA, ONE_PROCESS, halves)) == Verdict((), (), exported=True)


def test_an_export_that_says_another_model_is_found(
    folder: Path, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = exporter.hf_config
    monkeypatch.setattr(exporter, "hf_config", lambda *model: written(*model) | {"rms_norm_eps": 1e-2})
    verdict = Trials(folder / "exports", data).verdict(Draw(LLAMA, ONE_PROCESS, ONE_PROCESS))
    assert verdict.exported
    assert [problem.split(" in place of ")[0][:46] for problem in verdict.problems] == [
        "the export to llama has the validation loss 5."
    ]


# Slow: the two planted above are found in every run.
@pytest.mark.slow
@pytest.mark.parametrize("fault", faults_found.FAULTS)
def test_a_planted_fault_is_found_by_drawing(fault: Callable[[], None], folder: Path, data: list[str]) -> None:
    """Within 300 draws; `tests/support/faults_found.py` records after how many."""
    assert len([*faults_found.found([fault], Draws(300, data), Trials(folder / "planted", data), 300)]) == 1
