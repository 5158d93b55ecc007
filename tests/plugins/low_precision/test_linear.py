"""Products in FP8 against float64: what is rounded how, by which scale, and that nothing else is lost."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.device.weight_gradients import expect_first
from megatron_ext.parts.linear.compute import ColumnLinear, RowLinear
from megatron_ext.plugins.low_precision import linear
from megatron_ext.plugins.low_precision.formats import E4M3, E5M2, Block, Element, Format, chosen_layers, recipe
from megatron_ext.plugins.low_precision.linear import Multiplication, settings
from megatron_ext.plugins.low_precision.products import product
from megatron_ext.plugins.low_precision.quantize import Quantized, _rounded, largest_of_blocks, quantize
from tests.support.several_models import end_layout
from tests.support.small_models import LLAMA, build_small_model, small_config

RECIPES = ("tensorwise", "rowwise", "blockwise")
MANTISSA = {E4M3: 3, E5M2: 2}
LEAST_EXPONENT = {E4M3: -6, E5M2: -14}
LARGEST = {E4M3: 448.0, E5M2: 57_344.0}
TOKENS, INPUTS, OUTPUTS = 256, 384, 128


def blocks_of(name: str) -> tuple[Block, Block, bool]:
    """The blocks of activations and weights, and whether scales are powers of two."""
    activations, weights = recipe(name, E4M3).forward
    return activations.block, weights.block, activations.scale == "power of two"


def rounds(x: torch.Tensor, block: Block, element: Element, *, powers_of_two: bool = False, **given: Any) -> Quantized:
    return quantize(x, Format(block, element, "power of two" if powers_of_two else "fp32"), **given)


def rounded(x: torch.Tensor, dtype: Element) -> torch.Tensor:
    """x in float64, to the nearest number of the format, by its definition (arXiv:2209.05433, table 1)."""
    exponent = x.abs().log2().floor().clamp_min(LEAST_EXPONENT[dtype]).nan_to_num(neginf=LEAST_EXPONENT[dtype])
    step = torch.exp2(exponent - MANTISSA[dtype])
    return ((x / step).round() * step).clamp(-LARGEST[dtype], LARGEST[dtype])


def in_float64(x: torch.Tensor, block: Block, dtype: Element, powers_of_two: bool) -> torch.Tensor:
    """What `quantize` stands for, block by block in float64; scales are fp32 numbers."""
    result = torch.empty_like(x, dtype=torch.float64)
    high, wide = block.rows or x.size(0), block.columns or x.size(1)
    for row in range(0, x.size(0), high):
        for column in range(0, x.size(1), wide):
            part = x[row : row + high, column : column + wide].double()
            scale = (part.abs().max().float() / LARGEST[dtype]).double()
            scale = torch.exp2(scale.log2().ceil()) if powers_of_two else scale
            scale = torch.ones_like(scale) if scale == 0 else scale
            # The quotient is an fp32 number, too.
            result[row : row + high, column : column + wide] = rounded((part / scale).float().double(), dtype) * scale
    return result


def matrix(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of which some columns are 1,000 times the others, as activations have, and some are 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.where(torch.rand(columns, generator=generator) < 0.03, 1000.0, 1.0)
    return (x * (torch.rand(rows, columns, generator=generator) > 0.1)).to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_the_definition(recipe: str, dtype: Element, given: torch.dtype) -> None:
    activations, weights, powers = blocks_of(recipe)
    x = matrix(TOKENS, INPUTS, 1, given)
    x[:, :128] = 0
    x[:128] = 0
    for block in {activations, weights, activations.turned}:
        got = rounds(x, block, dtype, powers_of_two=powers)
        assert (got.values_RC.dtype, got.scales.dtype) == (getattr(torch, dtype.name), torch.float32)
        expected = in_float64(x, block, dtype, powers)
        # One rounding in fp32, of value times scale.
        assert ((got.dequantized().double() - expected).abs() <= 2**-24 * expected.abs()).all()
        scales = got.scales.repeat_interleave(block.rows or TOKENS, 0).repeat_interleave(block.columns or INPUTS, 1)
        smallest = 2.0 ** (LEAST_EXPONENT[dtype] - MANTISSA[dtype] - 1) * scales
        bound = torch.maximum(2.0 ** -(MANTISSA[dtype] + 1) * x.float().abs(), smallest)
        assert ((got.dequantized() - x.float()).abs() <= bound * (1 + 1e-6)).all()
        turned = got.transposed()
        assert torch.equal(turned.dequantized(), got.dequantized().t())
        assert turned.values_RC.is_contiguous()


@pytest.mark.parametrize(
    ("block", "asked"),
    [
        (Block(None, None), ["rows", "more rows", "columns"]),
        (Block(1, None), ["columns"]),
        (Block(None, 1), ["rows", "more rows"]),
        (Block(1, 128), []),
    ],
)
def test_a_block_that_is_cut_has_the_largest_value_of_its_own_ranks(
    block: Block, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that divide it, one group after another, and of nobody else; a known value is asked for by none."""
    seen: list[Any] = []

    def all_reduce(largest: torch.Tensor, operation: Any, group: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MAX
        seen.append(group)
        largest.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    cut: Any = (["rows", "more rows"], ["columns"])
    x = matrix(16, 128, 1)
    alone = rounds(x, block, E4M3)
    found = rounds(x, block, E4M3, cut=cut)
    assert seen == asked
    assert torch.equal(found.largest, alone.largest * 2 ** len(asked))
    again = rounds(x, block, E4M3, cut=cut, largest=found.largest)
    assert seen == asked
    assert torch.equal(again.scales, found.scales)


class _Ranks(NamedTuple):
    name: str
    ranks: int

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "divides", "over"),
    [
        (1, False, "outputs", {}),
        (1, False, "inputs", {}),
        (2, False, "outputs", {"outputs_over": ["tp"], "sums_over": "tp"}),
        (2, True, "outputs", {"outputs_over": ["tp"], "gathers_over": "tp"}),
        (2, False, "inputs", {"inputs_over": ["tp"]}),
        (2, True, "inputs", {"inputs_over": ["tp"]}),
    ],
)
@pytest.mark.parametrize(("format_", "gradients"), [("hybrid", E5M2), ("e4m3", E4M3)])
def test_who_finds_a_scale_together_and_who_gathers_or_sums(
    format_: str,
    gradients: Element,
    tensor: int,
    sequence_parallel: bool,
    divides: str,
    over: dict[str, Any],
    context: int,
) -> None:
    layout = {"world_size": 4, "tensor_model_parallel_size": tensor, "sequence_parallel": sequence_parallel}
    training = {"fp8_format": format_, "fp8_recipe": "rowwise", "gradient_accumulation_fusion": context == 2}
    groups: tuple[Any, Any] = _Ranks("tp", tensor), _Ranks("cp", context)
    how = settings(small_config(layout=layout, training=training), *groups, divides=divides)
    found = {
        name: [group.name for group in value] if isinstance(value, list) else value and value.name
        for name in ("tokens_over", "inputs_over", "outputs_over", "gathers_over", "sums_over")
        for value in [getattr(how, name)]
    }
    nobody = {"tokens_over": [], "inputs_over": [], "outputs_over": [], "gathers_over": None, "sums_over": None}
    assert found == {**nobody, "tokens_over": ["cp"] * (context == 2), **over}
    assert (how.recipe, how.adds_to_main_gradient) == (recipe("rowwise", gradients), context == 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stays_so(recipe: str, bad: float) -> None:
    """The step's own check must see it."""
    activations, weights, powers = blocks_of(recipe)
    x, weight = matrix(TOKENS, INPUTS, 1), matrix(OUTPUTS, INPUTS, 2)
    x[5, 7] = bad
    left = rounds(x, activations, E4M3, powers_of_two=powers)
    y = product(left, rounds(weight, weights, E4M3, powers_of_two=powers), torch.float32)
    assert not y[5].isfinite().all()


def test_the_smallest_and_largest_numbers_have_a_scale() -> None:
    for value in (1e-45, 1e-38, 3e38):
        x = torch.full((16, 128), value)
        for powers in (False, True):
            got = rounds(x, Block(1, 128), E4M3, powers_of_two=powers)
            assert got.scales.isfinite().all()
            assert (got.scales >= torch.finfo(torch.float32).tiny).all()
            assert got.dequantized()[0, 0] == pytest.approx(value, rel=2**-4, abs=1e-38)
    exact = rounds(torch.full((1, 128), 448.0 * 2**-20), Block(1, 128), E4M3, powers_of_two=True)
    assert exact.scales.item() == 2**-20, "a power of two stays"


@pytest.mark.parametrize("powers", [False, True])
def test_what_rounds_is_one_graph_for_the_compiler(powers: bool) -> None:
    """As megatron-core's fused functions are on a GPU; here each operation of the graph is run as it is."""
    x = matrix(TOKENS, INPUTS, 1, torch.bfloat16)
    functions: list[Any] = [largest_of_blocks, _rounded]
    compiled = [torch.compile(made, backend="aot_eager", fullgraph=True) for made in functions]
    expected = rounds(x, Block(1, 128), E5M2, powers_of_two=powers)
    largest = compiled[0](x, 1, 128)
    values, scales = compiled[1](x, largest, E5M2, expected.format.scale)
    assert torch.equal(largest, expected.largest)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(values.float(), expected.values_RC.float())


def factors(recipe: str, left: Element) -> tuple[Quantized, Quantized]:
    activations, weights, powers = blocks_of(recipe)
    return (
        rounds(matrix(TOKENS, INPUTS, 1), activations, left, powers_of_two=powers),
        rounds(matrix(OUTPUTS, INPUTS, 2), weights, E4M3, powers_of_two=powers),
    )


@pytest.mark.parametrize("left", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_add_in_fp32(recipe: str, left: Element) -> None:
    x, weight = factors(recipe, left)
    exact = [
        factor.values_RC.double()
        * factor.scales.double()
        .repeat_interleave(factor.values_RC.size(0) // factor.scales.size(0), 0)
        .repeat_interleave(INPUTS // factor.scales.size(1), 1)
        for factor in (x, weight)
    ]
    expected, sizes = exact[0] @ exact[1].t(), exact[0].abs() @ exact[1].abs().t()
    # Each factor is rounded once more in fp32, and each of K sums.
    bound = (INPUTS + 2) * 2**-24 * sizes
    y = product(x, weight, torch.float32)
    assert ((y.double() - expected).abs() <= bound).all()
    # torch has a CPU kernel for tensors and rows in later releases than 2.11.
    if recipe != "blockwise" and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        kind = F.ScalingType.TensorWise if recipe == "tensorwise" else F.ScalingType.RowWise
        scales = x.scales, weight.scales.t()
        torchs = F.scaled_mm(
            x.values_RC, weight.values_RC.t(), scales[0], kind, scales[1], kind, output_dtype=torch.float32
        )
        assert ((torchs.double() - expected).abs() <= bound).all()


def how_of(name: str, format_: str) -> Multiplication:
    return Multiplication(recipe(name, E5M2 if format_ == "hybrid" else E4M3))


@pytest.mark.parametrize("format_", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_three_products_of_a_layer(recipe: str, format_: str) -> None:
    """Against float64 of the same rounded numbers, and against what nobody rounds, within what rounding allows."""
    how, (activations, weights, powers) = how_of(recipe, format_), blocks_of(recipe)
    x = matrix(TOKENS, INPUTS, 1).view(128, 2, INPUTS).requires_grad_()
    weight = matrix(OUTPUTS, INPUTS, 2).requires_grad_()
    grad = matrix(TOKENS, OUTPUTS, 3).view(128, 2, OUTPUTS)
    y = linear.linear(x, weight, how)
    y.backward(grad)
    assert (y.shape, y.dtype) == (grad.shape, torch.float32)

    def near(got: Any, left: torch.Tensor, right: torch.Tensor, blocks: tuple[Block, Block], kind: Element) -> None:
        """got = left right^T, with each rounded along what is summed over."""
        exact = in_float64(left, blocks[0], kind, powers) @ in_float64(right, blocks[1], E4M3, powers).t()
        sizes = left.double().abs() @ right.double().abs().t()
        got = got.reshape(exact.shape).double()
        # Sums in fp32, of rounded factors that are at most (1 + 2^-3)(1 + 2^-4) = 1.2 times those given.
        assert ((got - exact).abs() <= 1.2 * (left.size(1) + 3) * 2**-24 * sizes + 1e-30).all()
        # Rounding to nearest: (1 + u)(1 + v) - 1 of the sum of sizes, u and v half a unit in the last place of each
        # format. The errors of subnormal numbers fit into what the others leave of that, since they have both signs.
        u, v = 2.0 ** -(MANTISSA[kind] + 1), 2.0**-4
        true = left.double() @ right.double().t()
        assert (got - true).norm() <= (u + v + u * v) * sizes.norm()
        assert (got - true).norm() > 1e-4 * sizes.norm(), "nothing was rounded"

    x_TK, grad_TN, weight_NK = x.detach().view(TOKENS, -1), grad.view(TOKENS, -1), weight.detach()
    near(y.detach(), x_TK, weight_NK, (activations, weights), E4M3)
    near(x.grad, grad_TN, weight_NK.t(), (activations, weights), how.recipe.input_gradient.left.element)
    near(weight.grad, grad_TN.t(), x_TK.t(), (activations, activations), how.recipe.input_gradient.left.element)


def test_weight_gradients_are_added_in_fp32() -> None:
    """With --gradient-accumulation-fusion and bf16 weights; autograd gets something that only has the shape."""
    how = how_of("tensorwise", "hybrid")
    x, grad = matrix(TOKENS, INPUTS, 1, torch.bfloat16).view(TOKENS, 1, -1), matrix(TOKENS, OUTPUTS, 3, torch.bfloat16)
    grad = grad.view(TOKENS, 1, -1)
    plain = matrix(OUTPUTS, INPUTS, 2, torch.bfloat16).requires_grad_()
    fused: Any = plain.detach().clone().requires_grad_()
    fused.main_grad = torch.ones(OUTPUTS, INPUTS)
    fused.grad_added_to_main_grad = False
    linear.linear(x, plain, how).backward(grad)
    linear.linear(x, fused, replace(how, adds_to_main_gradient=True)).backward(grad)
    assert fused.grad_added_to_main_grad
    assert fused.grad.shape == plain.shape
    assert plain.grad is not None
    # bf16 has 8 bits of mantissa, with the hidden one.
    assert ((fused.main_grad - 1 - plain.grad).abs() <= 2**-8 * plain.grad.abs() + 1e-4).all()
    assert not torch.equal((fused.main_grad - 1).bfloat16().float(), fused.main_grad - 1)
    sums = [torch.full((OUTPUTS, INPUTS), float("nan")), torch.zeros(OUTPUTS, INPUTS)]
    expect_first(sums[0])
    for fused.main_grad in sums:
        for _ in range(2):
            linear.linear(x, fused, replace(how, adds_to_main_gradient=True)).backward(grad)
    assert torch.equal(*sums), "the first one is written"


def counted(model: dict[str, Any], training: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], int]:
    """Numbers of the layers that multiply in FP8, and the products in FP8 of a step."""
    [gpt], _ = build_small_model(small_config(model, training=training))
    calls: list[object] = []
    genuine = linear.product
    monkeypatch.setattr(linear, "product", lambda *args, **options: calls.append(args) or genuine(*args, **options))
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    inputs = tokens[:, :-1], torch.arange(16).expand(2, 16)
    gpt.train()
    gpt(*inputs, labels=tokens[:, 1:]).sum().backward()
    trained = len(calls)
    gpt.eval()
    gpt(*inputs, labels=tokens[:, 1:])
    assert len(calls) == trained, "an evaluation multiplies as without FP8"
    layers: Any = gpt.decoder.layers
    found = {
        number
        for number, layer in enumerate(layers)
        for module in layer.modules()
        if isinstance(module, ColumnLinear | RowLinear) and module.trained_product is not None
    }
    assert getattr(gpt.output_layer, "trained_product", None) is None
    end_layout()
    return found, trained


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["biases, tied", "llama"])
def test_attention_and_mlp_of_the_chosen_layers(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with_all = {"fp8_format": "hybrid"}
    assert counted(model, with_all, monkeypatch) == ({0, 1, 2, 3}, 4 * 4 * 3)
    some = {**with_all, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}
    assert counted(model, some, monkeypatch) == ({1}, 4 * 3)
    assert counted(model, {}, monkeypatch) == (set(), 0)
    assert not chosen_layers(small_config(training={"first_last_layers_bf16": True}))


def test_what_is_kept_is_the_same() -> None:
    """A checkpoint holds nothing of FP8."""
    kept = []
    for training in ({}, {"fp8_format": "hybrid"}):
        [gpt], _ = build_small_model(small_config(LLAMA, training=training))
        kept.append(gpt.state_dict())
        end_layout()
    plain, in_fp8 = kept
    assert plain.keys() == in_fp8.keys()
    for name, tensor in plain.items():
        assert tensor is None or not isinstance(tensor, torch.Tensor) or torch.equal(tensor, in_fp8[name]), name
