"""Formats of blocks against their specifications in float64 and integers, for random numbers and those at the edges.

Compared once with torchao 0.18.0 (`to_mx` and `nvfp4_quantize`) on 10^6 random blocks of each format in bf16 and fp32,
and on these edges: equal to the bit, but for 7 blocks of 3 x 10^6 in fp32, where the logarithm in fp32 by which torchao
rounds an E8M0 scale up is rounded down to an integer.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatron_ext.plugins.low_precision.formats import E2M1, E4M3, E5M2, NVFP4, Block, Element, Format, Scale, recipe
from megatron_ext.plugins.low_precision.products import product
from megatron_ext.plugins.low_precision.quantize import Quantized, numbers_of, packed, quantize, rotated
from megatron_ext.plugins.low_precision.random_numbers import CLOCK, Draw, Places

EDGES = (0.0, -0.0, 1e-45, 1e-40, 2.0**-127, 2.0**-126, 0.25, 0.75, 1.75, 2.5, 3.5, 5.0, -6.0, 448.0, 464.0, 465.0)
EDGES += (57344.0, 61440.0, 3e38, 3.4028234e38, 448 * 2.0**-20, 6 * 2.0**-130)
NOT_FINITE = (math.inf, -math.inf, math.nan)


def blocks(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of random numbers of all sizes, and of each two numbers at the edges, among zeros and alone."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(4000, size, generator=generator) * torch.exp2(torch.randint(-130, 120, (4000, 1)).float())
    pairs = list(itertools.product(EDGES, repeat=2))
    made = torch.zeros(2 * len(pairs), size)
    for row, (one, other) in enumerate(pairs):
        made[2 * row, 0], made[2 * row, size // 2] = one, other
        made[2 * row + 1], made[2 * row + 1, -1] = one, other
    x = torch.cat((x, made)).to(dtype)
    return x[x.isfinite().all(1)]  # fp32 has numbers that are infinite in bf16


def numbers(element: Element) -> torch.Tensor:
    """All numbers of the element that are at least 0, in rising order, in float64; by its definition."""
    steps = 2**element.mantissa
    least = [mantissa / steps * 2.0**element.least for mantissa in range(steps)]
    exponents = range(element.least, element.exponent + 1)
    found = [*least, *((1 + m / steps) * 2.0**e for e in exponents for m in range(steps))]
    return torch.tensor([number for number in found if number <= element.largest], dtype=torch.float64)


def nearest(x: torch.Tensor, element: Element) -> torch.Tensor:
    """The element's number nearest to each number of float64, and of two the one with the even mantissa."""
    known = numbers(element)
    sizes = x.abs().clamp(max=element.largest)
    above = torch.searchsorted(known, sizes).clamp(max=len(known) - 1)
    below = (above - 1).clamp_min(0)
    up, down = known[above] - sizes, sizes - known[below]
    takes_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_above, known[above], known[below]).copysign(x)


def exponents(largest: torch.Tensor, element: Element, scale: str) -> torch.Tensor:
    """The biased exponents of E8M0 scales, by integers: of OCP MX 1.0, section 6.3, or rounded up."""
    found = []
    for number in largest.double().tolist():
        if scale == "e8m0 down":
            # A subnormal number of fp32 has the exponent bits of zero.
            exponent = math.frexp(number)[1] - 1 if number >= 2.0**-126 else -127
            found.append(min(max(exponent - element.exponent, -127), 127) + 127)
        else:
            quotient = torch.tensor(number).div(element.largest).item()
            mantissa, exponent = math.frexp(quotient)
            exponent = -127 if quotient == 0 else exponent - (mantissa == 0.5)
            found.append(min(max(exponent, -127), 127) + 127)
    return torch.tensor(found)


def values(x: Quantized) -> torch.Tensor:
    codes = x.values_RC
    return (numbers_of(codes) if x.format.element is E2M1 else codes.float()).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda element: element.name)
@pytest.mark.parametrize("scale", ["e8m0 up", "e8m0 down"])
def test_blocks_of_32_are_those_of_the_specification(scale: Scale, element: Element, dtype: torch.dtype) -> None:
    x = blocks(32, dtype)
    found = quantize(x, Format(Block(1, 32), element, scale))
    biased = exponents(x.float().abs().amax(1), element, scale)
    assert torch.equal(found.scales[:, 0].double(), torch.exp2(biased.double() - 127))
    # Numbers are divided by the scale, but for the smallest scale, which kernels leave out (up) or double (down).
    divisor = torch.exp2(biased.double() - 127)
    divisor[biased == 0] = 1.0 if scale == "e8m0 up" else 2.0**-126
    quotients = (x.double() / divisor[:, None]).float().double()
    assert torch.equal(values(found), nearest(quotients, element))
    assert torch.equal(values(found).signbit(), x.double().signbit())
    exact = nearest(quotients, element) * found.scales.double()
    assert torch.equal(found.dequantized(), exact.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 16), (16, 16)], ids=str)
def test_nvfp4_has_a_scale_of_blocks_and_one_of_the_tensor(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """arXiv:2509.25149, appendix C; of fp32 products the order is that of the kernels."""
    x = blocks(32, dtype)
    x = x[x.abs().amax(1) < 1e30][: len(x) // 2 // 16 * 16]
    rows, columns = shape
    found = quantize(x, Format(Block(*shape), E2M1, "e4m3"))
    largest = x.float().view(len(x) // rows, rows, 32 // columns, columns).abs().amax((1, 3))
    whole = largest.max() / (6 * 448)
    assert found.tensor_scale is not None
    assert found.tensor_scale == whole
    wanted = (largest / 6 / whole).double()
    assert torch.equal(found.scales.double(), nearest(wanted.clamp(2.0**-6, 448), E4M3))
    factor = (1 / whole / found.scales).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    quotients = (x.float() * factor).clamp(-6, 6).double()
    assert torch.equal(values(found), nearest(quotients, E2M1))


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_what_is_not_finite_stays_so_in_its_row(name: str, bad: float) -> None:
    """The step's own check must see it, whether the element type has an infinity or not."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(64, 128, generator=generator), torch.randn(32, 128, generator=generator)
    x[5, 7] = bad
    of_x, of_weight = recipe(name, E5M2).forward
    y = product(quantize(x, of_x), quantize(weight, of_weight), torch.float32)
    assert not y[5].isfinite().any()
    assert name == "nvfp4" or y[torch.arange(64) != 5].isfinite().all(), "NVFP4 has a scale of the whole tensor"


def test_a_tensor_of_zeros_is_zero() -> None:
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        for format in recipe(name, E5M2).forward:
            assert torch.equal(quantize(torch.zeros(32, 64), format).dequantized(), torch.zeros(32, 64))


def test_random_rounding_has_the_number_as_its_mean() -> None:
    x = torch.linspace(-6, 6, 41).repeat(4000, 1)
    x = torch.cat((x, torch.full((4000, 7), 6.0)), 1)
    draws = replace(NVFP4, stochastic=True)
    found = quantize(x, draws, draw=Draw(1, "weight"))
    near = quantize(x, NVFP4)
    assert torch.equal(found.scales, near.scales)
    scales = near.scales[0].repeat_interleave(16).double() * near.tensor_scale  # pyright: ignore[reportOperatorIssue]
    scaled = (x.double() / scales).clamp(-6, 6)
    known = torch.cat((-numbers(E2M1).flip(0), numbers(E2M1)))
    rounded = values(found)
    below = known[(torch.searchsorted(known, scaled[0] + 1e-6) - 1).clamp_min(0)]
    above = known[torch.searchsorted(known, scaled[0] - 1e-6).clamp(max=len(known) - 1)]
    assert ((rounded >= below) & (rounded <= above)).all(), "to one of the two neighbours"
    # Of 4,000 draws of a step of at most 2 the mean has a standard deviation of 2 / 2 / sqrt(4000) at most.
    assert ((rounded.mean(0) - scaled[0]).abs() < 5 / math.sqrt(4000)).all()
    assert (rounded.std(0) > 0).sum() > 20


def test_random_numbers_follow_from_seed_name_step_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, x = Draw(1, "weight"), torch.empty(64, 96)
    whole = draw.uniform(x)
    assert (whole.min() >= 0, whole.max() < 1, abs(whole.mean() - 0.5) < 0.02) == (True, True, True)
    assert abs(torch.corrcoef(torch.stack((whole[:, :-1].flatten(), whole[:, 1:].flatten())))[0, 1]) < 0.05
    assert torch.equal(draw.turned.uniform(x.t()), whole.t())
    for rank in (0, 1):
        own = replace(draw, columns=Places(rank, 2, stride=2)).uniform(x[:, :48])
        assert torch.equal(own, whole.view(64, 2, 2, 24)[:, :, rank].flatten(1))
        chunks = [whole.chunk(4)[number] for number in (rank, 3 - rank)]
        assert torch.equal(replace(draw, rows=Places(rank, 2, mirrored=True)).uniform(x[:32]), torch.cat(chunks))
    others = [Draw(2, "weight"), Draw(1, "other")]
    assert not any(torch.equal(other.uniform(x), whole) for other in others)
    assert not any(torch.equal(other.signs(x.device), draw.signs(x.device)) for other in others)
    assert set(draw.signs(x.device).tolist()) == {1.0, -1.0}
    monkeypatch.setattr(CLOCK, "step", 1)
    assert not torch.equal(draw.uniform(x), whole)


def test_a_rotation_of_both_factors_changes_no_product() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 64, generator=generator), torch.randn(24, 64, generator=generator)
    signs = Draw(1, "weight").signs(x.device)
    assert (rotated(x, signs) @ rotated(y, signs).t() - x @ y.t()).abs().max() < 1e-5
    spike = torch.zeros(1, 16)
    spike[0, 3] = 4.0
    assert torch.equal(rotated(spike, signs).abs(), torch.ones(1, 16)), "an outlier is spread over its block"


def test_codes_lie_two_to_a_byte() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    assert packed(codes).view(torch.uint8).tolist() == [[16, 50, 84, 118, 152, 186, 220, 254]]
    assert numbers_of(codes)[0, 8:].tolist() == [-number for number in numbers(E2M1).tolist()]


@pytest.mark.parametrize("exponent", [-120, -8, 0, 1, 64, 119])
def test_a_scale_is_rounded_up_by_the_smallest_step(exponent: int) -> None:
    """A block's largest value of 448 x 2^e has the scale 2^e, and the next number of fp32 has 2^(e+1)."""
    largest = torch.tensor(448.0 * 2.0**exponent)
    above = torch.nextafter(largest, torch.tensor(torch.inf))
    blocks = torch.zeros(2, 32)
    blocks[0, 0], blocks[1, 5] = largest, above
    scales = quantize(blocks, Format(Block(1, 32), E4M3, "e8m0 up")).scales
    assert scales.flatten().tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]
