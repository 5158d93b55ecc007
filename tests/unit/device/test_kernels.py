"""The operations that stand in for torch's own on a CPU give the same values and gradients."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.device import kernels
from megatron_ext.device.kernels import linear, rms_norm, swiglu
from megatron_ext.device.weight_gradients import expect_first


def gradients(output: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [output.detach(), *torch.autograd.grad(output, inputs, torch.randn_like(output))]


@pytest.mark.parametrize("shape", [(24,), (5, 24), (7, 3, 24)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_f_linear(shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    bias = torch.randn(40, requires_grad=True) if biased else None
    inputs = (x, weight) if bias is None else (x, weight, bias)
    expected = gradients(F.linear(x, weight, bias), *inputs)
    torch.testing.assert_close(gradients(linear(x, weight, bias), *inputs), expected, rtol=1e-5, atol=1e-5)


def test_linear_reads_views_and_skips_gradients_that_nobody_wants() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(24, 10).t(), torch.randn(50, 24, requires_grad=True)
    part = weight[:40]
    (got,) = torch.autograd.grad(linear(x, part).square().sum(), weight)
    (expected,) = torch.autograd.grad(F.linear(x, part).square().sum(), weight)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.fixture
def gemm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have this process multiply by the library that the test is given."""
    kernels.use_gemm(request.param)
    yield
    kernels.use_gemm(kernels.gemm_by_ability())


@pytest.mark.parametrize("gemm", kernels.GEMMS, indirect=True)
@pytest.mark.usefixtures("gemm")
def test_every_library_gives_the_products_and_gradients_of_f_linear() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 3, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    expected = gradients(F.linear(x.double(), weight.double()).float(), x, weight)
    torch.testing.assert_close(gradients(linear(x, weight), x, weight), expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        for rows in (x[0], x.repeat(9, 1, 1)):
            torch.testing.assert_close(linear(rows, weight), F.linear(rows, weight), rtol=1e-5, atol=1e-5)


def test_a_product_writes_the_first_gradient_where_it_belongs() -> None:
    """What autograd gets is that memory, and no other; the second gradient of a step has memory of its own."""
    torch.manual_seed(0)
    x, weight = torch.randn(7, 512) / 23, cast(Any, torch.nn.Parameter(torch.randn(256, 512)))  # large for any library
    weight.main_grad = torch.full((256, 512), float("nan"))
    expect_first(weight.main_grad)
    (expected,) = torch.autograd.grad(F.linear(x, weight).square().sum(), weight)
    (first,) = torch.autograd.grad(linear(x, weight).square().sum(), weight)
    (second,) = torch.autograd.grad(linear(x, weight).square().sum(), weight)
    assert first.data_ptr() == weight.main_grad.data_ptr() != second.data_ptr()
    torch.testing.assert_close([first, second], [expected, expected], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs a processor with AVX2")
def test_without_avx_512_the_blas_multiplies_whoever_made_the_processor() -> None:
    program = "from megatron_ext.device import kernels; print(kernels.gemm_by_ability(), kernels.measured_gemm())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["blas", "blas"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_swiglu_has_the_bits_of_its_operations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, 2 * 24, dtype=dtype, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    expected = gradients(F.silu(gate) * up, x)
    assert all(map(torch.equal, gradients(swiglu(x), x), expected))
    with torch.no_grad():
        assert torch.equal(swiglu(x), expected[0])


def test_the_gradient_of_swiglu_is_its_derivative() -> None:
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(swiglu, (torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True),))


@pytest.mark.parametrize("shape", [(6, 32), (7, 3, 32), (2, 5, 3, 32)])
def test_rms_norm_is_f_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(32, requires_grad=True)
    expected = gradients(F.rms_norm(x, (32,), weight, 1e-3), x, weight)
    torch.testing.assert_close(gradients(rms_norm(x, weight, 1e-3), x, weight), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_of_zeros_is_finite() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x, torch.ones(8), 1e-5).sum(), x)
    assert torch.isfinite(grad).all()


def test_16_bit_types_stay_what_they_are() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8, 8, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(rms_norm(x, weight[0], 1e-5), F.rms_norm(x, (8,), weight[0], 1e-5))


@pytest.mark.parametrize("gemm", kernels.GEMMS, indirect=True)
@pytest.mark.usefixtures("gemm")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("counts", [[5, 0, 300, 1], [1, 33, 64, 2, 31], [7, 3], [1]])
def test_products_of_experts_are_those_one_by_one(counts: list[int], in_place: bool) -> None:
    """To the bit, also where an expert has no row, and where a step's first gradients are written in place."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 40, generator=generator, requires_grad=True)
    weight = cast(Any, torch.nn.Parameter(torch.randn(len(counts), 56, 40, generator=generator)))
    upstream = torch.randn(sum(counts), 56, generator=generator)
    one_by_one = [
        linear(rows, matrix) if len(rows) else F.linear(rows, matrix)
        for rows, matrix in zip(x.split(counts), weight.unbind(0), strict=True)
    ]
    expected = torch.cat(one_by_one)
    expected_gradients = torch.autograd.grad(expected, (x, weight), upstream)
    if in_place:
        weight.main_grad = torch.full_like(weight, 7.0)
        expect_first(weight.main_grad)
    found = kernels.linear_by_expert(x, weight, torch.tensor(counts))
    gradients = torch.autograd.grad(found, (x, weight), upstream)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected_gradients, strict=True))
    if in_place:
        assert gradients[1].data_ptr() == weight.main_grad.data_ptr()
