"""A rank that compiles nothing never imports torch's compiler; one that does has the whole of it."""

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch

from megatron_ext.forkserver.ranks import run_ranks


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


def _parts_of_the_compiler() -> list[str]:
    return [name for name in sys.modules if name.startswith("torch._dynamo.")]


def _trained(steps: int) -> float:
    """Return the weight after some steps of Adam."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    for _ in range(steps):
        (weight**2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.item()


def _without_a_compiler() -> tuple[list[str], list[str], float]:
    torch.distributed.init_process_group("gloo")
    found = _trained(3)
    inspect.getmodule(torch.ones(1))  # asks every module for its file
    before = _parts_of_the_compiler()
    importlib.import_module("torch._dynamo.utils")
    after = [name for name in ("torch._dynamo.utils", "torch._dynamo.config") if name in _parts_of_the_compiler()]
    assert _trained(3) == found
    return before, after, found


def test_an_optimizer_needs_none() -> None:
    [(before, after, weight)] = run_ranks(1, _without_a_compiler)
    assert before == []
    assert after == ["torch._dynamo.utils", "torch._dynamo.config"]
    assert weight == _trained(3)


def _compiled() -> dict[str, Any]:
    @torch.compiler.disable
    def left_alone(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    apart: Any = left_alone
    doubled: Any = torch.compiler.disable(_Doubled.apply)
    zeros, x = torch.zeros, torch.arange(4.0)
    eager = apart(x.sin()) + doubled(x)
    before = _parts_of_the_compiler()
    whole: Any = torch.compile(lambda x: x.sin() + torch.ones_like(x), backend="eager", fullgraph=True)
    parts: Any = torch.compile(lambda x: apart(x.sin()) + doubled(x), backend="eager")
    same = [torch.equal(whole(x), x.sin() + 1), torch.equal(parts(x), eager)]
    compiler = importlib.import_module("torch._dynamo")
    breaks = sum(compiler.utils.counters["graph_break"].values())
    return {"before": before, "same": same, "breaks": breaks, "is restored": torch.zeros is zeros}


def test_functions_that_are_not_to_be_compiled_are_not() -> None:
    [found] = run_ranks(1, _compiled)
    assert found["before"] == []
    assert found["same"] == [True, True]
    assert found["breaks"] == 2
    assert found["is restored"]


@pytest.mark.parametrize("name", ["torch._dynamo.config", "torch._dynamo.utils"])
def test_a_part_of_it_is_imported_once(name: str) -> None:
    [found] = run_ranks(1, _part, name)
    assert found == (True, True, name)


def _part(name: str) -> tuple[bool, bool, str]:
    part = importlib.import_module(name)
    assert part.__spec__ is not None
    is_one = getattr(sys.modules["torch._dynamo"], name.rpartition(".")[2]) is part is sys.modules[name]
    return is_one, torch._dynamo is sys.modules["torch._dynamo"], part.__spec__.name
