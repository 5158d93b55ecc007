"""Run by test_cuda_path.py as fake_gpu.py is: products in eight and four bits on fake CUDA tensors.

What torch's kernels demand beyond that stands in ATen/native/cuda/ScaledBlas.cpp and its fake `_scaled_mm`.
"""

import importlib.util
import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from megatron_ext.device import cuda
from megatron_ext.plugins.low_precision import quantize as quantizing
from megatron_ext.plugins.low_precision.describe import FewBits
from megatron_ext.plugins.low_precision.experts import Groups, linear_by_group
from megatron_ext.plugins.low_precision.formats import E4M3, E5M2, Block, Element, Format, recipe
from megatron_ext.plugins.low_precision.linear import Multiplication, linear
from megatron_ext.plugins.low_precision.products import product
from megatron_ext.plugins.low_precision.quantize import quantize
from megatron_ext.plugins.low_precision.random_numbers import Draw
from tests.support.fake_tensors import backward, on_gpu
from tests.support.operator_calls import Calls, aten
from tests.support.small_models import small_config

RECIPES = ("tensorwise", "rowwise", "blockwise")
TOKENS, INPUTS, OUTPUTS = 1024, 640, 384
KINDS = {
    "tensorwise": [("TensorWise", "TensorWise")] * 3,
    "rowwise": [("RowWise", "RowWise")] * 3,
    "blockwise": [("BlockWise1x128", "BlockWise128x128")] * 2 + [("BlockWise1x128", "BlockWise1x128")],
    "mxfp8": [("BlockWise1x32", "BlockWise1x32")] * 3,
    "mxfp4": [("BlockWise1x32", "BlockWise1x32")] * 3,
    "nvfp4": [("BlockWise1x16", "BlockWise1x16")] * 3,
}
"""The blocks of Y, dX and dW: pairs that cuBLAS multiplies."""


def demanded_scales(kind: str, rows: int, summed: int, right: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides of a factor's scales."""
    if kind == "TensorWise":
        return (1, 1), (1, 1)
    if kind == "RowWise":
        return ((1, rows), (1, 1)) if right else ((rows, 1), (1, 1))
    if kind == "BlockWise1x128":
        return (rows, summed // 128), (1, rows)
    padded = -(-(summed // 128) // 4) * 4
    return (padded, rows // 128), (1, padded)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("format_", [E5M2, E4M3], ids=["hybrid", "e4m3"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_kernels_get_what_they_take(
    name: str, format_: Element, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    how = Multiplication(recipe(name, format_), adds_to_main_gradient=fused)
    with FakeTensorMode(), Calls() as calls:
        x, weight = on_gpu(TOKENS // 2, 2, INPUTS).requires_grad_(), on_gpu(OUTPUTS, INPUTS).requires_grad_()
        if fused:
            weight.main_grad = on_gpu(OUTPUTS, INPUTS, dtype=torch.float32)  # pyright: ignore
            weight.grad_added_to_main_grad = False  # pyright: ignore
        y = linear(x, weight, how)
        assert (tuple(y.shape), y.dtype, y.device.type) == ((TOKENS // 2, 2, OUTPUTS), torch.bfloat16, "cuda")
        made = backward(y, "_LinearBackward", on_gpu(TOKENS // 2, 2, OUTPUTS))
    assert [(gradient.shape, gradient.dtype) for gradient in made] == [(x.shape, x.dtype), (weight.shape, weight.dtype)]
    products = [(args, out) for func, args, out in calls.calls if func is aten._scaled_mm_v2.default]
    sizes = [(TOKENS, INPUTS, OUTPUTS), (TOKENS, OUTPUTS, INPUTS), (OUTPUTS, TOKENS, INPUTS)]
    result = [torch.bfloat16, torch.bfloat16, torch.float32 if fused else torch.bfloat16]
    left_formats = [getattr(torch, element.name) for element in (E4M3, format_, format_)]
    for number, (args, out) in enumerate(products):
        left, right, (left_scale,), left_kind, _, (right_scale,), right_kind, *_ = args
        rows, summed, columns = sizes[number]
        assert (tuple(left.shape), tuple(right.shape)) == ((rows, summed), (summed, columns))
        assert (left.stride(), right.stride()) == ((summed, 1), (1, summed)), "Hopper reads along the sum alone"
        assert (left.dtype, right.dtype, out.dtype) == (left_formats[number], torch.float8_e4m3fn, result[number])
        for kind, given, scale, of_rows, is_right in (
            (KINDS[name][number][0], left_kind, left_scale, rows, False),
            (KINDS[name][number][1], right_kind, right_scale, columns, True),
        ):
            assert given == [getattr(F.ScalingType, kind).value]
            shape, strides = demanded_scales(kind, of_rows, summed, is_right)
            assert (tuple(scale.shape), scale.dtype) == (shape, torch.float32)
            # The stride of a single element says nothing, and torch's kernels do not read it.
            read = [one for one in (0, 1) if scale.size(one) > 1]
            assert [scale.stride(one) for one in read] == [strides[one] for one in read], (kind, scale.shape)
        if name != "blockwise":  # torch's fake of the older operator checks the rest
            with left.fake_mode:
                aten._scaled_mm(left, right, left_scale, right_scale, out_dtype=out.dtype)
    assert len(products) == 3
    # Fast sums in the forward pass alone, as Transformer Engine has them, and not with blocks.
    fast = [bool(args[11]) if len(args) > 11 else False for args, _ in products]
    assert fast == [name != "blockwise", False, False]
    assert not [func for func, _, _ in calls.calls if "_local_scalar_dense" in str(func)], "nobody waits for the device"


BLACKWELL = ("mxfp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", BLACKWELL)
def test_blackwells_kernels_get_what_they_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fake of the older operator checks types, strides and the numbers of scales in tiles."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    how = Multiplication(recipe(name, E4M3), draw=Draw(1, "weight"))
    in_fp4 = name != "mxfp8"
    with FakeTensorMode(), Calls() as calls:
        x, weight = on_gpu(TOKENS // 2, 2, INPUTS).requires_grad_(), on_gpu(OUTPUTS, INPUTS).requires_grad_()
        made = backward(linear(x, weight, how), "_LinearBackward", on_gpu(TOKENS // 2, 2, OUTPUTS))
    assert [(gradient.shape, gradient.dtype) for gradient in made] == [(x.shape, x.dtype), (weight.shape, weight.dtype)]
    products = [(args, out) for func, args, out in calls.calls if func is aten._scaled_mm_v2.default]
    sizes = [(TOKENS, INPUTS, OUTPUTS), (TOKENS, OUTPUTS, INPUTS), (OUTPUTS, TOKENS, INPUTS)]
    assert len(products) == 3
    for (rows, summed, columns), ((left, right, scales, kinds, tiles, *rest), out) in zip(sizes, products, strict=True):
        summed = summed // 2 if in_fp4 else summed
        assert (tuple(left.shape), tuple(right.shape), out.dtype) == ((rows, summed), (summed, columns), torch.bfloat16)
        [kind] = {one for pair in KINDS[name] for one in pair}
        whole = [F.ScalingType.TensorWise.value] if name == "nvfp4" else []
        assert kinds == [getattr(F.ScalingType, kind).value, *whole]
        assert tiles == [F.SwizzleType.SWIZZLE_32_4_4.value, *([F.SwizzleType.NO_SWIZZLE.value] if whole else [])]
        assert [scale.dtype for scale in scales[1:]] == [torch.float32] * len(whole)
        with left.fake_mode:
            aten._scaled_mm(left, right, scales[0], rest[0][0], out_dtype=out.dtype)


GROUPED = {"rowwise": True, "mxfp8": True, "tensorwise": False, "nvfp4": False}


@pytest.mark.parametrize(("name", "grouped"), GROUPED.items())
def test_experts_are_multiplied_in_one_call_where_torch_has_it(
    name: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    experts, rows = 3, [40, 0, 70]
    how = [Multiplication(recipe(name, E4M3), draw=Draw(1, str(expert))) for expert in range(experts)]
    with FakeTensorMode(), Calls() as calls:
        x = on_gpu(sum(rows), INPUTS).requires_grad_()
        weight = on_gpu(experts, OUTPUTS, INPUTS).requires_grad_()
        groups = Groups.of([rows], [(0, 0)], torch.device("cuda"))
        y = linear_by_group(x, weight, groups, how)
        made = backward(y, "_ByGroupBackward", on_gpu(sum(rows), OUTPUTS))
    assert (y.shape, *(gradient.shape for gradient in made)) == ((sum(rows), OUTPUTS), x.shape, weight.shape)
    in_one = [args for func, args, _ in calls.calls if func is aten._scaled_grouped_mm_v2.default]
    alone = [args for func, args, _ in calls.calls if func is aten._scaled_mm_v2.default]
    assert (len(in_one), len(alone)) == ((3, 0) if grouped else (0, 6))
    for left, right, (left_scale,), _, _, (right_scale,), _, _, ends, *_ in in_one:
        with left.fake_mode:  # torch's fake of the older operator checks types, strides and scales
            aten._scaled_grouped_mm(left, right, left_scale, right_scale, ends, out_dtype=torch.bfloat16)


LAYERS = {"qkv": (384, 128), "proj": (128, 128), "fc1": (768, 128), "fc2": (128, 384)}
"""Outputs and inputs. Single blocks and equal sides are compiled for anew."""


def train_on_the_cpu(name: str) -> None:
    """A forward and a backward pass of layers of several sizes."""
    how = Multiplication(recipe(name, E5M2))
    for outputs, inputs in LAYERS.values():
        x = torch.randn(128, 2, inputs, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.nn.Parameter(torch.randn(outputs, inputs, dtype=torch.bfloat16))
        linear(x, weight, how).sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_compiled_is_given_plain_tensors(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter, and a tensor that has a gradient, would each be compiled for anew."""
    given: list[torch.Tensor] = []

    def recorded(name: str) -> Any:
        genuine = getattr(quantizing, name)
        plain = getattr(genuine, "_torchdynamo_orig_callable", genuine)
        return lambda x, *rest: given.append(x) or plain(x, *rest)

    for name in ("largest_of_blocks", "_rounded"):
        monkeypatch.setattr(quantizing, name, recorded(name))
    train_on_the_cpu(recipe)
    assert {(type(x), x.requires_grad) for x in given} == {(torch.Tensor, False)}
    assert len(given) >= 8 * len(LAYERS), "of three matrices the largest values, and five times what is rounded"


# Slow: what is compiled for all sizes changes with torch alone.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_rounding_is_compiled_for_all_sizes_of_a_model(
    recipe: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch says so when it has compiled a function so often that it gives it up."""
    made: Counter[str] = Counter()
    genuine = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        def make(graph: Any, _inputs: Any) -> Any:
            made[function.__name__] += 1
            return graph.forward

        return genuine(function, backend=make, **options)

    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr("megatron.core.jit.jit_fuser", counted)
    spec: Any = importlib.util.spec_from_file_location("quantize_again", quantizing.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    for name in ("largest_of_blocks", "_rounded"):
        monkeypatch.setattr(quantizing, name, getattr(again, name))
    torch.compiler.reset()
    with dynamo_config.patch(recompile_limit=8), caplog.at_level(logging.WARNING):
        again.compile_for_all_sizes()
        train_on_the_cpu(recipe)
        first = made.copy()
        train_on_the_cpu(recipe)
    assert first.keys() == {"largest_of_blocks", "_rounded"}
    assert made == first, "the second step compiles nothing"
    assert "recompile_limit" not in caplog.text


@pytest.mark.parametrize(
    ("version", "capability", "of_product"),
    [
        ("2.11.0+cu130", (8, 9), torch.bfloat16),
        ("2.11.0+cu130", (10, 0), torch.bfloat16),
        ("2.11.0+cu130", (9, 0), torch.float32),
        ("2.15.0+cu132", (10, 0), torch.float32),
    ],
)
def test_products_by_rows_have_the_precision_that_torch_has_there(
    version: str, capability: tuple[int, int], of_product: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ScaledBlas.cpp: "Only bf16 and fp16 high precision output types are supported for row-wise scaling"."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    rows = Format(Block(1, None))
    with FakeTensorMode(), Calls() as calls:
        left, right = (quantize(on_gpu(size, 64), rows) for size in (32, 48))
        assert product(left, right, torch.float32).dtype == torch.float32
        assert product(left, right, torch.bfloat16).dtype == torch.bfloat16
    made = [out.dtype for operator, _, out in calls.calls if operator is aten._scaled_mm_v2.default]
    assert made == [of_product, torch.bfloat16]


@pytest.mark.parametrize(
    ("capability", "flags", "words"),
    [
        (
            (8, 0),
            "fp8 tensorwise",
            "8.9 or more, and a GPU has compute capability 8.0; leave --fp8-format out",
        ),
        (
            (8, 9),
            "fp8 blockwise",
            "9.0 (Hopper), and a GPU has compute capability 8.9; use --fp8-recipe rowwise",
        ),
        ((10, 0), "fp8 blockwise", "compute capability 10.0; use --fp8-recipe rowwise"),
        ((9, 0), "fp8 mxfp8", "blocks of 32 need compute capability 10.0 (Blackwell) or more, and a GPU has compute"),
        (
            (9, 0),
            "fp4 nvfp4",
            "9.0; use --fp8-format hybrid instead, or leave --fp4-format out to train",
        ),
        (
            (9, 0),
            "fp4 mxfp4",
            "FP4 needs compute capability 10.0 (Blackwell) or more, and a GPU has compute",
        ),
        ((8, 9), "fp8 rowwise", None),
        ((9, 0), "fp8 blockwise", None),
        ((10, 0), "fp8 tensorwise", None),
        ((10, 3), "fp8 mxfp8", None),
        ((10, 0), "fp4 nvfp4", None),
    ],
)
def test_an_older_gpu_is_told(
    capability: tuple[int, int], flags: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    here, (kind, name) = cuda.CudaDevice(0), flags.split()
    training = {f"{kind}_format": "hybrid" if kind == "fp8" else "e2m1", f"{kind}_recipe": name}
    found = FewBits().missing(small_config(training=training), here)
    assert (found is None) == (words is None)
    assert words is None or (words in str(found) and f"--{kind}-recipe {name}" in str(found))
    assert FewBits().missing(small_config(training={f"{kind}_recipe": name}), here) is None
