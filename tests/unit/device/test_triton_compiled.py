"""Every Triton kernel becomes machine code for an A100, an H100 and a B200, with registers and shared memory to spare.

The calls are those of the functions themselves, on tensors without memory; what a kernel is given there (types, sizes,
constants) is what it is compiled for. Triton's wheel brings NVIDIA's assembler, so that no GPU is needed.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# ruff: noqa: E402
triton = pytest.importorskip("triton")

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from megatron_ext.device.triton import cross_entropy, kernel_choice, many_tensors, norm, rotary, swiglu

CAPABILITIES = (80, 90, 100)
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program can have (CUDA C++ Programming Guide, table of compute capabilities)."""
REGISTERS_OF_MULTIPROCESSOR = 65536
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
POINTERS = {**TYPES, torch.int64: "*i64"}

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_()


def both_passes(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def heads(table: torch.Tensor | None, interleaved: bool, dtype: torch.dtype) -> None:
    table = None if table is None else table.to(dtype)
    both_passes(*rotary.split_heads(on_meta(2048, 4, 8, 6 * 128, dtype=dtype), table, 128, interleaved=interleaved))


def rotation(table: torch.Tensor, interleaved: bool, dtype: torch.dtype) -> None:
    x = on_meta(2048, 4, 16, 128, dtype=dtype).permute(1, 2, 0, 3)
    both_passes(rotary.rotate(x, table.to(dtype), interleaved=interleaved))


def norm_alone(columns: int, centered: bool, dtype: torch.dtype) -> None:
    x, weight = on_meta(8192, columns, dtype=dtype), on_meta(columns, dtype=dtype)
    both_passes(norm.layer_norm(x, weight, weight, 1e-5) if centered else norm.rms_norm(x, weight, 1e-5))


def norm_of_sum(columns: int, centered: bool, dtype: torch.dtype) -> None:
    x, weight = on_meta(8192, columns, dtype=dtype), on_meta(columns, dtype=dtype)
    both_passes(*norm.norm_of_sum(x, x * 2, weight, weight if centered else None, 1e-5))


def activation(weighted: bool, dtype: torch.dtype) -> None:
    weights = on_meta(8192, dtype=torch.float32) if weighted else None
    both_passes(swiglu.swiglu(on_meta(8192, 2 * 5504, dtype=dtype), weights))


def loss(columns: int, dtype: torch.dtype) -> None:
    labels = torch.empty(8192, dtype=torch.int64, device="meta")
    both_passes(cross_entropy.cross_entropy(on_meta(8192, columns, dtype=dtype), labels))


TABLE, OF_DOCUMENTS = (torch.empty(*shape, 64, device="meta") for shape in ((2, 2048), (2, 4, 1, 2048)))
CALLS: dict[str, Callable[[torch.dtype], None]] = {
    **{
        f"{called.__name__} of {columns}{', centered' * centered}": (
            lambda dtype, called=called, columns=columns, centered=centered: called(columns, centered, dtype)
        )
        for called in (norm_alone, norm_of_sum)
        for columns in (128, 768, 2048, kernel_choice.WIDEST)
        for centered in (False, True)
    },
    **{
        f"{called.__name__}{', documents' * (table is OF_DOCUMENTS)}{', interleaved' * interleaved}": (
            lambda dtype, called=called, table=table, interleaved=interleaved: called(table, interleaved, dtype)
        )
        for called in (heads, rotation)
        for table in (TABLE, OF_DOCUMENTS)
        for interleaved in (False, True)
    },
    "heads, nothing rotated": lambda dtype: heads(None, False, dtype),
    "SwiGLU": lambda dtype: activation(False, dtype),
    "SwiGLU of experts": lambda dtype: activation(True, dtype),
    **{
        f"loss of {columns}": lambda dtype, columns=columns: loss(columns, dtype)
        for columns in (257, 50_304, 128_256, 262_144)
    },
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches that were asked for."""
    made: list[Launch] = []
    for module in (cross_entropy, many_tensors, norm, rotary, swiglu):
        monkeypatch.setattr(
            module, "launch", lambda kernel, grid, *given, **constants: made.append((kernel, grid, given, constants))
        )
    return made


def source_of(launch: Launch) -> tuple[Any, dict[str, int]]:
    """A kernel with types and constants, as Triton's launcher would find them, and its options."""
    kernel, _, given, constants = launch
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, given, strict=False)):
        if isinstance(value, int) and value == 1:
            signature[name], constants[name] = "constexpr", 1
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    return ASTSource(kernel, ordered, constants, attributes), options


def assembled(ptx: str, capability: int, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that do not fit in them, as the assembler reports them."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", str(path), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,), spilled = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    return int(registers), sum(map(int, spilled))


def check(made: Launch, capability: int, folder: Path) -> None:
    source, options = source_of(made)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    assert compiled.metadata.shared <= SHARED[capability]
    registers, spilled = assembled(compiled.asm["ptx"], capability, folder)
    assert spilled == 0, f"{spilled} bytes of {made[0].__name__} {made[3]} do not fit in {registers} registers"
    assert registers * 32 * options["num_warps"] <= REGISTERS_OF_MULTIPROCESSOR
    assert all(size <= limit for size, limit in zip(made[1], (2**31 - 1, 65535, 65535), strict=False)), made[1]


def products_in_32_bits(made: Launch) -> list[str]:
    """Products of two numbers that are no constants, in a kernel as it is read."""
    source, options = source_of(made)
    target, context = GPUTarget("cuda", 90, 32), ir.context()
    backend: Any = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    given = backend.get_codegen_implementation(parsed), backend.get_module_map()
    found = []
    for function in str(source.make_ir(target, parsed, *given, context)).split("tt.func")[1:]:
        constants = set(re.findall(r"(%\S+) = arith\.constant", function))
        constants |= {name for name, of in re.findall(r"(%\S+) = tt\.splat (%\S+)", function) if of in constants}
        products = re.findall(r"arith\.muli (%\S+), (%\S+) .*: (?:tensor<\S*x)?i32", function)
        found += [f"{one} x {other}" for one, other in products if one not in constants and other not in constants]
    return found


WIDE: dict[str, Callable[[], None]] = {
    "norm": lambda: norm_of_sum(2048, True, torch.bfloat16),
    "heads": lambda: heads(OF_DOCUMENTS, False, torch.bfloat16),
    "rotation": lambda: rotation(TABLE, True, torch.bfloat16),
    "activation": lambda: activation(True, torch.bfloat16),
    "loss": lambda: loss(50_304, torch.bfloat16),
}


@pytest.mark.parametrize("name", WIDE)
def test_places_have_64_bits(name: str, launches: list[Launch]) -> None:
    """A tensor may have more than 2^31 elements. What a norm's programs sum has some hundred rows."""
    WIDE[name]()
    for made in launches:
        allowed = {"norm_backward": 2}.get(made[0].__name__, 0)
        assert len(products_in_32_bits(made)) == allowed, (made[0].__name__, products_in_32_bits(made))


def test_a_norm_with_its_sum_is_compiled_for_hopper(launches: list[Launch], tmp_path: Path) -> None:
    """The largest of the usual ones, in the suite of every day."""
    norm_of_sum(2048, False, torch.bfloat16)
    assert [launch[0].__name__ for launch in launches] == ["norm_forward", "norm_backward"]
    check(launches[1], 90, tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_loss_of_bf16_logits_is_compiled(capability: int, launches: list[Launch], tmp_path: Path) -> None:
    """The one that reads most."""
    loss(50_304, torch.bfloat16)
    assert [launch[0].__name__ for launch in launches] == ["cross_entropy_forward", "cross_entropy_backward"]
    for launch in launches:
        check(launch, capability, tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_updates_of_many_tensors_are_compiled(capability: int, launches: list[Launch], tmp_path: Path) -> None:
    """Their sums are one instruction with the product before, as torch's own kernels have it."""
    tensors, number = [torch.empty(5), torch.empty(7)], torch.empty(())
    many_tensors.scale_(tensors, number)
    many_tensors.lerp_(tensors, tensors, number)
    assert [launch[0].__name__ for launch in launches] == ["scale_many", "lerp_many"]
    for launch in launches:
        check(launch, capability, tmp_path)
        assert products_in_32_bits(launch) == []
    source, options = source_of(launches[1])
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "fma.rn.f32" in compiled.asm["ptx"]


# Slow: every kernel, type and GPU; the test above compiles the largest norm for one.
@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_compiled(
    name: str, dtype: torch.dtype, capability: int, launches: list[Launch], tmp_path: Path
) -> None:
    CALLS[name](dtype)
    assert len(launches) == 2, "forward and backward"
    for launch in launches:
        check(launch, capability, tmp_path)
