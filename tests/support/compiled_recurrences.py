"""Run by tests/unit/parts/gated_delta/test_kernels.py in a process of its own, which fla-core believes to have an H100:
each kernel that the seam launches, forward and backward, becomes machine code for sm_90, with the types and constants
of the launch. Of the blocks that a GPU would choose among by time, the first are taken.
"""

import importlib
import inspect
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from megatron_ext.parts.norm.describe import Norm
from megatron_ext.plugins.gated_delta.describe import GatedDelta
from megatron_ext.plugins.gated_delta.rule import rule_of

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
SHARED = 227 * 1024
"""Bytes that a program can have on an H100 (CUDA C++ Programming Guide, table of compute capabilities)."""
SIZE, LENGTH = 128, 128
Launch = tuple[Any, dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels that were launched, with their arguments and options."""
    for name in ("fla.utils", "fla.utils.hardware"):
        module = importlib.import_module(name)
        for fact in ("IS_NVIDIA", "IS_NVIDIA_HOPPER", "IS_TF32_SUPPORTED"):
            monkeypatch.setattr(module, fact, True)
        monkeypatch.setattr(module, "check_shared_mem", lambda *_, **__: True)
    made: list[Launch] = []

    def launch(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        made.append((kernel, dict(zip(kernel.arg_names, given, strict=False)) | named))

    def first(tuner: Any, *given: Any, **named: Any) -> None:
        tuner.fn.run(*given, **named, **tuner.configs[0].all_kwargs())

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(Autotuner, "run", first)
    return made


def compiled(kernel: Any, given: dict[str, Any]) -> Any:
    """Compile a kernel as Triton's launcher would for these arguments."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        value, fixed = given.get(name, default), not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (fixed and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = TYPES[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        if is_tensor or (fixed and isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    options = {name: given[name] for name in ("num_warps", "num_stages") if name in given}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def both_passes(kind: str, documents: bool) -> None:
    """Launch what a key head and two value heads of 128 channels need in bf16."""
    heads, decays = (1, 1, 1, 2, LENGTH), SIZE if kind == "kda" else 1
    inputs = [
        *(torch.randn(1, 1, 1, 1, LENGTH, SIZE) for _ in range(2)),
        torch.randn(*heads, SIZE),
        -torch.rand(*heads, decays),
        None if kind == "simple_gla" else torch.rand(*heads, 1),
        torch.zeros(1, 1, 1, 2, SIZE, SIZE),
    ]
    leaves = [x.requires_grad_() for x in inputs if x is not None]
    ids = (torch.arange(LENGTH) > 50).long()[None, None, None, None] if documents else None
    described = GatedDelta(1, 2, SIZE, SIZE, 4, Norm("RMSNorm", 1e-5), kernels="fla")
    outputs: Any = rule_of(described, torch.bfloat16)(*inputs, ids)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])


def check(launched: list[Launch]) -> None:
    for kernel, given in launched:
        made = compiled(kernel, given)
        assert made.asm["cubin"].startswith(b"\x7fELF")
        assert made.metadata.shared <= SHARED, (kernel.__name__, made.metadata.shared)


def test_states_from_chunk_to_chunk_are_compiled_for_hopper(launches: list[Launch]) -> None:
    """The kernels that take and give states, in the suite of every day."""
    for kind in ("gated_delta_rule", "simple_gla"):
        both_passes(kind, documents=True)
    of_states = ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "chunk_fwd_kernel_h", "chunk_bwd_kernel_dh")
    named = {launch[0].__name__: launch for launch in launches}
    check([named[name] for name in of_states])


# Slow: every kernel; the test above compiles some.
@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "simple_gla"])
def test_every_kernel_is_compiled_for_hopper(kind: str, documents: bool, launches: list[Launch]) -> None:
    both_passes(kind, documents)
    assert len(launches) >= 8
    check(launches)
