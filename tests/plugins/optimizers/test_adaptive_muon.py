"""AdaptiveMuon against the package that has it, and what its second moment is of."""

import shlex
from typing import Any

import pytest
import torch

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.parallel.matrices import Matrix
from megatron_ext.plugins.optimizers.adaptive_muon import AdaptiveMuon
from tests.support.matrix_steps import assert_a_stack_is_its_matrices, begun, trained
from tests.support.wrong_flags import BASE

METHODS = ("adamuon", "normuon", "namo")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_twenty_steps_are_those_of_megatrons_package(method: str, nesterov: bool) -> None:
    package = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.adaptive_muon")  # it needs Triton
    settings = {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.2, "fp32_matmul_prec": "highest"}
    settings |= {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    settings |= {"moment2_method": method, "beta2": 0.9, "eps": 1e-6}
    ours, theirs = begun(), begun()
    trained(AdaptiveMuon(ours, **settings), ours)
    trained(package.AdaptiveMuon(theirs, **settings), theirs)
    assert max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True)) <= 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_experts_of_a_stack_are_matrices_each(method: str) -> None:
    assert_a_stack_is_its_matrices(lambda weights: AdaptiveMuon(weights, lr=1e-2, moment2_method=method))


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("", {}),
        ("--adaptive-muon-moment2-method namo --adaptive-muon-beta2 0.5", {"moment2_method": "namo", "beta2": 0.5}),
        ("--adaptive-muon-eps 0.1 --muon-momentum 0.5", {"eps": 0.1, "momentum": 0.5}),
    ],
)
def test_flags_reach_the_update(flags: str, settings: dict[str, Any]) -> None:
    config = resolve(parse(shlex.split(f"{BASE} --optimizer adaptive_muon {flags}")).values, Facts()).optimizer
    own, expected = begun([(22, 12)]), begun([(22, 12)])
    vars(own[0])["matrix"] = Matrix((22, 12))
    made = torch_optimizer(config)([{"params": own, "update": "matrix", "lr": 0.1, "weight_decay": 0.1}])
    trained(made, own, 3)
    trained(AdaptiveMuon(expected, lr=0.1, weight_decay=0.1, **settings), expected, 3)
    assert torch.equal(own[0], expected[0])
    assert list(made.state[own[0]]) == ["momentum_buffer", "moment2_buffer"]
