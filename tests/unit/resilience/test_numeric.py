"""The check for NaN and infinity."""

import math

import pytest
import torch

from megatron_ext.resilience.numeric import BadTensor, first_bad

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
