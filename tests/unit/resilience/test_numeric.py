"""The check for NaN and infinity."""

import math
import shlex

import pytest
import torch

from megatron_ext.errors import NumericError
from megatron_ext.resilience.numeric import BadTensor, first_bad, is_spoiled
from megatron_ext.train.configure import configure
from megatron_ext.train.step import train_step
from tests.support.small_runs import MODEL, are_equal, built, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.randn(7, 300).to(dtype) for name in ("a", "b", "c")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "nan", "inf"), [(math.nan, 1, 0), (math.inf, 0, 1), (-math.inf, 0, 1)], ids=["nan", "inf", "-inf"]
)
@pytest.mark.parametrize("place", [(0, 0), (3, 17), (6, 299)])
def test_one_bad_element_is_found_anywhere(
    dtype: torch.dtype, value: float, nan: int, inf: int, place: tuple[int, int]
):
    named = tensors(dtype)
    named["b"][place] = value
    assert first_bad(named.items()) == BadTensor("b", nan, inf)


def test_the_first_is_named_and_its_elements_counted():
    named = tensors(torch.float32)
    named["b"][0, :3] = math.nan
    named["b"][1, :2] = math.inf
    named["c"][0, 0] = math.nan
    assert first_bad(named.items()) == BadTensor("b", nan=3, inf=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_values_are_fine(dtype: torch.dtype):
    assert first_bad([("a", torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))]) is None


def test_mixed_dtypes_empty_and_integer_tensors():
    named = tensors(torch.float32) | {"half": torch.ones(4, dtype=torch.float16), "none": torch.empty(0)}
    named["counts"] = torch.ones(3, dtype=torch.int64)
    assert first_bad(named.items()) is None
    named["half"][2] = math.inf
    assert first_bad(named.items()) == BadTensor("half", 0, 1)
    assert first_bad([]) is None


STEPS = [range(start, start + 4) for start in range(0, 16_000, 4)]


def spoiled(flags: str, ranks: int = 4) -> list[tuple[int, int]]:
    """Return the first sample and the rank of each spoiled step."""
    config = configure([*MODEL, *shlex.split(flags)]).config
    return [(step.start, rank) for step in STEPS for rank in range(ranks) if is_spoiled(config, step, rank)]


def test_one_of_so_many_steps_of_a_rank_is_spoiled() -> None:
    found = spoiled("--error-injection-rate 50")
    assert len(found) == pytest.approx(4 * len(STEPS) / 50, rel=0.2)
    assert len({start for start, _ in found}) == len(found), "one rank of a step"
    assert {rank for _, rank in found} == {0, 1, 2, 3}
    assert spoiled("") == []
    assert spoiled("--error-injection-rate 50 --seed 5") != found


@pytest.mark.parametrize("kind", ["transient_error", "persistent_error", "correct_result"])
def test_only_a_transient_error_is_gone_after_a_restart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--error-injection-rate 20 --error-injection-type {kind}"
    first = spoiled(flags)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = spoiled(flags)
    assert (first == again) == (kind != "transient_error")
    assert len(set(first) & set(again)) < 0.2 * len(first) or kind != "transient_error"


def test_a_spoiled_step_changes_no_weight_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with built("--error-injection-rate 1") as run:
        before = weights(run)
        with pytest.raises(NumericError, match=r"rank 0: NaN or infinity in the loss, iteration 1 \(samples from 0\)"):
            train_step(run, range(4))
        assert are_equal(weights(run), before)
    assert "warning: rank 0 injects an error into the step of the samples from 0\n" in capfd.readouterr().err


def test_it_needs_the_check_that_sees_it() -> None:
    flags = "--error-injection-rate 3 --no-check-for-nan-in-loss-and-grad"
    said = configure([*MODEL, *shlex.split(flags)]).typed.warnings
    assert any("--error-injection-rate" in text and "nobody looks" in text for text in said)
