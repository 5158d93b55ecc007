"""Adafactor against torch's, what it keeps, and where."""

import shlex
from typing import Any

import pytest
import torch

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.cost.state_bytes import state_bytes
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.parallel.matrices import Matrix
from megatron_ext.parts.catalogue import parameters
from megatron_ext.plugins.optimizers.adafactor import Adafactor
from tests.support.matrix_steps import assert_a_stack_is_its_matrices, begun, trained
from tests.support.wrong_flags import BASE

SETTINGS = {"beta2_decay": -0.5, "d": 1.5, "eps": (None, 0.2)}
FLAGS = "--optimizer adafactor --adafactor-beta2-decay=-0.5 --adafactor-clip 1.5 --adafactor-eps2 0.2"


@pytest.mark.parametrize(("flags", "settings"), [("--optimizer adafactor", {}), (FLAGS, SETTINGS)])
def test_twenty_steps_are_torchs(flags: str, settings: dict[str, Any]) -> None:
    ours, theirs = begun(), begun()
    for one in ours:
        vars(one)["matrix"] = Matrix(tuple(one.shape))
    config = resolve(parse(shlex.split(f"{BASE} {flags}")).values, Facts()).optimizer
    made = torch_optimizer(config)([{"params": ours, "update": "matrix", "lr": 1e-2, "weight_decay": 0.1}])
    trained(made, ours)
    known = torch.optim.Adafactor(theirs, lr=1e-2, weight_decay=0.1, **settings)
    trained(known, theirs)
    assert max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True)) <= 1e-6
    for one, other in zip(ours, theirs, strict=True):
        for name in ("row_var", "col_var"):
            assert made.state[one][name].shape == known.state[other][name].shape
            torch.testing.assert_close(made.state[one][name], known.state[other][name])


def test_experts_of_a_stack_are_matrices_each() -> None:
    assert_a_stack_is_its_matrices(lambda weights: Adafactor(weights, clip=0.5))


def test_of_matrices_next_to_nothing_is_kept() -> None:
    config = resolve(parse(shlex.split(f"{BASE} --optimizer adafactor --bf16")).values, Facts())
    sizes = {"matrix": 0, "element": 0}
    for parameter in parameters(config):
        sizes[parameter.update] += parameter.size
    assert state_bytes(config).optimizer == pytest.approx(4 + 8 * sizes["element"] / sum(sizes.values()))
