"""Run by tests/unit/parts/gated_delta/test_kernels.py in a process of its own, where Triton's interpreter runs
fla-core's kernels on CPU tensors, against our own rule.

Two things are given to them there. Blocks are the first of those that a GPU would choose among by time. A loop counts
in tensors, as in a compiled kernel, where Triton 3.9's interpreter counts in numbers of Python, which have no `.to`.
"""

import ast
import gc
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import ASTTransformer

from megatron_ext.parts.norm.describe import Norm
from megatron_ext.plugins.gated_delta.describe import GatedDelta
from megatron_ext.plugins.gated_delta.rule import rule_of

KINDS = {"gated_delta_rule": 1, "kda": 6, "simple_gla": 1}
"""Name of a kernel in fla-core, and decays of a head."""


def _counted_in_tensors(transformer: Any, loop: ast.For) -> ast.AST:
    """Begin the body with `i = i`, of which the interpreter makes a tensor, as of each assignment."""
    if isinstance(loop.target, ast.Name):
        name = loop.target.id
        value = ast.Name(id=name, ctx=ast.Load())
        loop.body.insert(0, ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value))
    return transformer.generic_visit(loop)


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> None:
    ASTTransformer.visit_For = _counted_in_tensors  # pyright: ignore[reportAttributeAccessIssue]
    for name in KINDS:
        importlib.import_module(f"fla.ops.{name}")
    for found in gc.get_objects():
        if Autotuner in type(found).__mro__:
            found.configs = found.configs[:1]


def _rule(kernels: str, dtype: torch.dtype = torch.float32) -> Any:
    return rule_of(GatedDelta(1, 2, 6, 5, 4, Norm("RMSNorm", 1e-5), kernels=kernels), dtype)


def _inputs(kind: str, rows: int, length: int, *, reads: bool = True, mapped: int = 0) -> list[torch.Tensor | None]:
    """Of a key head and two value heads; values have 5 channels, and `mapped` more of zeros, as of what a state is
    made of."""
    torch.manual_seed(length)
    of_keys, of_values, size = (1, rows, 1, 1), (1, rows, 1, 2), 6
    found = (
        torch.randn(*of_keys, length, size) if reads else None,
        F.normalize(torch.randn(*of_keys, length, size), dim=-1),
        F.pad(torch.randn(*of_values, length, 5), (0, mapped)),
        -2.0 * torch.rand(*of_values, length, KINDS[kind]),
        None if kind == "simple_gla" else torch.rand(*of_values, length, 1),
        torch.randn(*of_values, size, 5 + mapped),
    )
    return [x if x is None else x.requires_grad_() for x in found]


def _both_passes(rule: Any, inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """What is read, the last state, and the gradients of all inputs."""
    outputs = [x for x in rule(*inputs) if x is not None]
    torch.manual_seed(0)
    gradients = [torch.randn(x.shape) for x in outputs]  # whatever the order in memory
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


def _far(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert len(ours) == len(theirs)
    return max(float(((one - other).norm() / one.norm()).detach()) for one, other in zip(ours, theirs, strict=True))


# Slow: a whole chunk of decays by channel, of which the interpreter computes each position by itself; what begins anew
# and what goes on is in the other cases.
CASES = [
    pytest.param(kind, case, marks=[pytest.mark.slow] * (kind == "kda" and case == "a chunk and more"))
    for kind in KINDS
    for case in ("a chunk and more", "documents", "what states are mapped to")
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_kernels_compute_our_rule(kind: str, case: str) -> None:
    documents = None
    if case == "documents":
        # The first row goes on from its state, and the second begins anew at once.
        documents = torch.tensor([[0] * 3 + [1] * 4 + [2], [1] * 8])[None, :, None, None]
        inputs = _inputs(kind, 2, 8)
    elif case == "a chunk and more":
        inputs = _inputs(kind, 1, 66)
    else:
        inputs = _inputs(kind, 1, 5, reads=False, mapped=1 if kind == "simple_gla" else 6)
    ours, theirs = (_both_passes(_rule(kernels), [*inputs, documents]) for kernels in ("torch", "fla"))
    assert _far(ours, theirs) < 1e-5


def test_of_16_bits_are_queries_keys_and_values_alone() -> None:
    """In fp16, which the interpreter's numpy has."""
    inputs = _inputs("gated_delta_rule", 1, 20)
    ours, theirs = (_both_passes(rule, inputs) for rule in (_rule("torch"), _rule("fla", torch.float16)))
    assert 1e-5 < _far(ours, theirs) < 5e-3
