"""Muon against the packages that have it, against its equation, and what it takes for a matrix."""

import shlex
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.newton_schulz import COEFFICIENT_TYPES, SCALE_MODES, coefficients, scale
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.cost.state_bytes import state_bytes
from megatron_ext.optim.muon import Muon, newton_schulz
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.parallel.matrices import Matrix
from megatron_ext.parts.catalogue import parameters
from tests.support.matrix_steps import SHAPES, begun, trained
from tests.support.wrong_flags import BASE


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": True, "scale_mode": "unit_rms_norm", "coefficient_type": "polar_express", "num_ns_steps": 9},
        {"nesterov": True, "scale_mode": "shape_scaling", "coefficient_type": "aol"},
        {"coefficient_type": "cans", "num_ns_steps": 6},
        {"coefficient_type": "deepseekv4", "num_ns_steps": 12},
        {"coefficient_type": "simple", "num_ns_steps": 3},
    ],
    ids=lambda settings: settings.get("coefficient_type", "defaults"),
)
def test_twenty_steps_are_those_of_megatrons_package(settings: dict[str, Any]) -> None:
    """Within 1e-6, or what rounding does: the package refuses fp64, and `cans` amplifies rounding where a singular
    value is 1, as that of one row always is. There the slope of its six polynomials is -28,622 (of the other settings
    at most 4.6), and 20 steps in fp32 are up to 8e-5 off fp64, with AVX2 and AVX-512 alike, for an update of 2e-3."""
    package = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers")  # it needs Triton
    exact = {"extra_scale_factor": 0.2, "fp32_matmul_prec": "highest"}
    arguments = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, **exact, **settings}
    ours, theirs, in_fp64 = begun(), begun(), [weight.double() for weight in begun()]
    trained(Muon(ours, **arguments), ours)
    trained(package.Muon(theirs, **arguments), theirs)
    trained(Muon(in_fp64, **arguments), in_fp64)
    for one, other, known in zip(ours, theirs, in_fp64, strict=True):
        rounding = (one - known).abs().max().item()
        assert (one - other).abs().max().item() <= max(1e-6, 3 * rounding)
        assert rounding <= (1e-6 if len(one) > 1 or settings.get("coefficient_type") != "cans" else 2e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_twenty_steps_are_those_of_torch_but_for_its_bf16(nesterov: bool) -> None:
    """torch makes orthogonal in bf16: the weights' ways differ by less than its rounding, 2^-8, amplified."""
    ours, theirs, start = begun(SHAPES[:5]), begun(SHAPES[:5]), begun(SHAPES[:5])
    arguments = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    trained(Muon(ours, **arguments, coefficient_type="simple", extra_scale_factor=0.2), ours)
    trained(torch.optim.Muon(theirs, **arguments, adjust_lr_fn="match_rms_adamw"), theirs)
    for one, other, before in zip(ours, theirs, start, strict=True):
        assert torch.dist(one, other) < 0.02 * torch.dist(one, before)


@pytest.mark.parametrize("kind", COEFFICIENT_TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (40, 24)])
def test_singular_vectors_stay_and_values_follow_the_polynomials(kind: str, rows: int, columns: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, rows, columns, dtype=torch.float64)
    made = newton_schulz(x, coefficients(kind, 6), transposed=rows > columns)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in coefficients(kind, 6):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(made, left * values.unsqueeze(-2) @ right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(newton_schulz(x, coefficients(kind, 6), transposed=rows <= columns), made)


def test_matrices_of_one_shape_together_have_the_bits_of_each_alone() -> None:
    together, alone = begun(), begun()
    trained(Muon(together, lr=1e-2), together)
    optimizers = [Muon([weight], lr=1e-2) for weight in alone]

    class Each:
        def step(self) -> None:
            for optimizer in optimizers:
                optimizer.step()

    trained(Each(), alone)
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def parted(shape: tuple[int, ...], sections: tuple[int, ...] = (), **settings: Any) -> torch.Tensor:
    [weight] = begun([shape])
    vars(weight)["matrix"] = Matrix(shape, sections)
    [after] = trained(Muon([weight], lr=1e-2, **settings), [weight], 1)
    return after


def test_queries_keys_and_values_are_three_matrices() -> None:
    """Of two groups of heads with six rows of queries, three of keys and two of values each."""
    [start] = begun([(22, 12)])
    gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(1)) + start
    rows = torch.arange(22).view(2, 11)
    expected = start.clone()
    for part in (rows[:, :6], rows[:, 6:9], rows[:, 9:]):
        own = part.flatten()
        expected[own] -= 1e-2 * orthogonal(gradient[own])
    torch.testing.assert_close(parted((22, 12), (6, 3, 2)), expected)
    whole = parted((22, 12), (6, 3, 2), no_split_qkv=True)
    torch.testing.assert_close(whole, start - 1e-2 * orthogonal(gradient))
    assert not torch.allclose(whole, expected)


def test_experts_of_a_stack_are_matrices_each() -> None:
    [start] = begun([(3, 8, 12)])
    gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(1)) + start
    expected = torch.stack([one - 1e-2 * orthogonal(own) for one, own in zip(start, gradient, strict=True)])
    torch.testing.assert_close(parted((3, 8, 12)), expected)


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    rows, columns = gradient.shape
    made = newton_schulz(gradient[None], coefficients("quintic", 5), transposed=rows > columns)[0]
    return made * scale("spectral", rows, columns)


def test_scales() -> None:
    assert [scale(mode, 32, 8) for mode in SCALE_MODES] == [32**0.5, 2.0, 2.0]
    assert [scale(mode, 8, 32) for mode in SCALE_MODES] == [32**0.5, 0.5, 1.0]


def test_zeros_stay_and_what_has_no_gradient_is_left() -> None:
    zero, idle = torch.zeros(4, 6), torch.ones(4, 6)
    zero.grad = torch.zeros(4, 6)
    optimizer = Muon([zero, idle], lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(zero, torch.zeros(4, 6))
    assert torch.equal(idle, torch.ones(4, 6))
    assert idle not in optimizer.state


def test_on_a_cpu_products_are_in_fp32_and_torchs_setting_is_put_back() -> None:
    plain, rounded = begun(), begun()
    trained(Muon(plain, lr=1e-2, fp32_matmul_prec="highest"), plain)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        trained(Muon(rounded, lr=1e-2), rounded)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(one, other) for one, other in zip(plain, rounded, strict=True))


CHANGED = {
    "--muon-momentum 0.5": {"momentum": 0.5},
    "--muon-nesterov": {"nesterov": True},
    "--muon-scale-mode unit_rms_norm": {"scale_mode": "unit_rms_norm"},
    "--muon-extra-scale-factor 0.5": {"extra_scale_factor": 0.5},
    "--muon-num-ns-steps 3": {"num_ns_steps": 3},
    "--muon-coefficient-type cans": {"coefficient_type": "cans"},
    "--muon-no-split-qkv": {"no_split_qkv": True},
}


GROUP: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


def of_two_kinds() -> list[torch.Tensor]:
    weights = [*begun([(22, 12)]), torch.linspace(-1, 1, 5)]
    vars(weights[0])["matrix"] = Matrix((22, 12), (6, 3, 2))
    return weights


class Both:
    """Muon, and Adam, each as it is used without this program."""

    def __init__(self, weights: list[torch.Tensor], settings: dict[str, Any]):
        self.each = [Muon(weights[:1], **GROUP, **settings), torch.optim.AdamW(weights[1:], **GROUP)]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()


@pytest.mark.parametrize("flags", ["", *CHANGED])
def test_flags_reach_the_update_of_matrices_and_adam_has_the_rest(flags: str) -> None:
    settings = resolve(parse(shlex.split(f"{BASE} --optimizer muon {flags}")).values, Facts()).optimizer
    own, expected, plain = of_two_kinds(), of_two_kinds(), of_two_kinds()
    kinds = zip(own, ("matrix", "element"), strict=True)
    made = torch_optimizer(settings)([{"params": [weight], "update": kind, **GROUP} for weight, kind in kinds])
    trained(made, own, 3)
    trained(Both(expected, CHANGED.get(flags, {})), expected, 3)
    trained(Both(plain, {}), plain, 3)
    torch.testing.assert_close(own, expected)
    assert torch.equal(plain[0], own[0]) == (not flags)
    assert [list(made.state[weight]) for weight in own] == [["momentum_buffer"], ["step", "exp_avg", "exp_avg_sq"]]


def test_what_is_kept_is_one_moment_of_matrices_and_two_of_the_rest() -> None:
    config = resolve(parse(shlex.split(f"{BASE} --optimizer muon --bf16")).values, Facts())
    sizes = Counter[str]()
    for parameter in parameters(config):
        sizes[parameter.update] += parameter.size
    assert state_bytes(config).optimizer == pytest.approx(
        4 + (4 * sizes["matrix"] + 8 * sizes["element"]) / sizes.total()
    )
