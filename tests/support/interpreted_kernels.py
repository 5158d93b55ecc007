"""Run by test_cuda_path.py in a process of its own, where Triton's interpreter runs every kernel on CPU tensors.

Each result is held against float64. A result that is rounded once is off by half a unit in its last place; by a whole
one in bf16, whose numbers the interpreter cuts off where a GPU rounds. What is computed before, in fp32, is off by as
many roundings as stand at each comparison, of the size of the terms that are added.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import gpu_operations
from megatron_ext.device import many_tensors
from megatron_ext.device.triton import cross_entropy as loss
from megatron_ext.device.triton import kernel_choice, norm, rotary
from megatron_ext.device.triton import many_tensors as many_kernels
from megatron_ext.device.triton import swiglu as activation
from megatron_ext.device.triton.cross_entropy import cross_entropy
from megatron_ext.device.triton.norm import layer_norm, norm_of_sum, rms_norm
from megatron_ext.device.triton.rotary import rotate, split_heads
from megatron_ext.device.triton.swiglu import swiglu
from megatron_ext.parts.attention.rope import rotate_reference

interpreter: Any = vars(triton.runtime.interpreter)["_interpreter"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-3


def cases(*choices: Sequence[Any], daily: int) -> list[Any]:
    """All combinations, of which every n-th belongs to the suite of every day: the interpreter takes its time."""
    every = itertools.product(*choices)
    return [pytest.param(*case, marks=[pytest.mark.slow] * (place % daily > 0)) for place, case in enumerate(every)]


@triton.jit
def count(out, end):
    for place in range(0, end):
        tl.store(out + place, place)


def interprets_loops() -> bool:
    """Whether the interpreter takes the end of a loop from a number that it is given: Triton 3.6 needs numpy < 2.4."""
    out = torch.zeros(3, dtype=torch.int32)
    try:
        count[(1,)](out, 3)
    except Exception:  # whatever the interpreter makes of a TypeError
        return False
    return out.tolist() == [0, 1, 2]


needs_loops = pytest.mark.skipif(not interprets_loops(), reason="this Triton's interpreter and numpy disagree on loops")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors take several tiles, and a program of the weights' gradient takes several of them."""
    monkeypatch.setattr(norm, "_TILE", 256)
    monkeypatch.setattr(norm, "_PROGRAMS", 2)
    monkeypatch.setattr(rotary, "_TILE", 128)
    monkeypatch.setattr(activation, "_BLOCK", 32)
    monkeypatch.setattr(loss, "_BLOCK", 32)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exactly(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


def within(got: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor, roundings: float) -> None:
    """Hold a result against float64.

    Args:
        terms: sums of the absolute values that were added, of the result's shape.
        roundings: in fp32, of a number of that size.
    """
    kind = torch.finfo(got.dtype)
    units = 1.0 if got.dtype == torch.bfloat16 else 0.5
    allowed = units * kind.eps * exact.abs() + roundings * 2.0**-24 * terms + kind.smallest_normal * kind.eps
    excess = ((got.double() - exact).abs() - allowed).max().item()
    assert math.isfinite(excess)
    assert excess <= 0.0, f"{excess:.3g} more than {allowed.min().item():.3g} to {allowed.max().item():.3g}"


def inner_parts(shape: tuple[int, ...], dtype: torch.dtype, spaced: bool) -> torch.Tensor:
    """Inputs whose rows lie apart, if they are to."""
    if not spaced:
        return drawn(*shape, dtype=dtype)
    return drawn(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2:-3]


def normal(x: torch.Tensor, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized rows, and their inverse deviations."""
    x = x - x.mean(-1, keepdim=True) if centered else x
    inverse = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * inverse, inverse


NORMS = ("rms", "layer", "rms of sum", "layer of sum")
SHAPES = ((3, 5, 37), (1, 1), (2, 3, 4, 64), (3, 500))


@needs_loops
@pytest.mark.parametrize(("kind", "dtype", "spaced", "shape"), cases(NORMS, DTYPES, (True, False), SHAPES, daily=9))
def test_norms(kind: str, dtype: torch.dtype, spaced: bool, shape: tuple[int, ...]) -> None:
    x = inner_parts(shape, dtype, spaced).requires_grad_()
    weight = (drawn(shape[-1], dtype=torch.float32, seed=1) + 1.0).to(dtype).requires_grad_()
    bias = drawn(shape[-1], dtype=dtype, seed=2).requires_grad_() if "layer" in kind else None
    added: dict[str, torch.Tensor] = {}
    if "sum" in kind:
        residual = drawn(*shape, dtype=dtype, seed=3).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        y, total = norm_of_sum(x, residual, weight, bias, EPS)
        parts = x.detach().double(), residual.detach().double()
        within(total, parts[0] + parts[1], parts[0].abs() + parts[1].abs(), 1)
        added = {"residual": residual, "total": total}
    else:
        y = rms_norm(x, weight, EPS) if bias is None else layer_norm(x, weight, bias, EPS)
        total = x
    exact, wide = exactly(total), [exactly(weight)] + ([] if bias is None else [exactly(bias)])
    normalized, inverse = normal(exact, bias is not None)
    expected = normalized * wide[0] + (0.0 if bias is None else wide[1])
    # Sums over a row round as often as its logarithm, twice with a mean; some eight operations on each number.
    size = shape[-1]
    roundings = 8.0 + 4.0 * math.log2(size + 1)
    spread = exact.abs() + exact.abs().mean(-1, keepdim=True)  # what a mean is taken from
    terms = spread * inverse * wide[0].abs() + (0.0 if bias is None else wide[1].abs())
    within(y, expected.detach(), terms.detach(), roundings)

    grad, onward = drawn(*shape, dtype=dtype, seed=4), drawn(*shape, dtype=dtype, seed=5)
    outputs, grads = (y, grad), (grad,)
    leaves = [x, *([added["residual"]] if added else []), weight, *([] if bias is None else [bias])]
    if added:
        made = torch.autograd.grad([y, total], leaves, [grad, onward])
        assert torch.equal(made[0], made[1]), "a sum hands its gradient to both"
    else:
        made = torch.autograd.grad([outputs[0]], leaves, list(grads))
    exact_made = torch.autograd.grad([expected], [exact, *wide], [grad.double()])
    onwards = onward.double() if added else torch.zeros(())
    weighted = (grad.double() * wide[0]).abs()
    size_of = (spread * inverse).detach()
    terms = (
        weighted + size_of * (weighted * size_of).mean(-1, keepdim=True) + weighted.mean(-1, keepdim=True)
    ) * inverse
    within(made[0], (exact_made[0] + onwards).detach(), (terms + onwards.abs()).detach(), 3 * roundings)
    rows = (0,) if len(shape) == 1 else tuple(range(len(shape) - 1))
    count = math.log2(math.prod(shape) + 1)
    of_weights = [(grad.double().abs() * size_of).sum(rows), grad.double().abs().sum(rows)]
    for got, known, terms in zip(made[-len(wide) :], exact_made[1:], of_weights, strict=False):
        within(got, known, terms, roundings + 8 * count + 8)


@needs_loops
def test_a_sum_that_only_one_result_uses() -> None:
    x, residual, weight = (drawn(*shape, dtype=torch.float32).requires_grad_() for shape in ((4, 9), (4, 9), (9,)))
    y, total = norm_of_sum(x, residual, weight, None, EPS)
    alone, others, of_weight = torch.autograd.grad(total.sum(), (x, residual, weight), allow_unused=True)
    assert torch.equal(alone, torch.ones_like(x))
    assert torch.equal(others, alone)
    assert of_weight is None, "nothing is computed for a norm that nobody uses"
    y, total = norm_of_sum(x, residual, weight, None, EPS)
    (of_norm,) = torch.autograd.grad(y.sum(), x)
    again = total.detach().requires_grad_()
    (known,) = torch.autograd.grad(rms_norm(again, weight, EPS).sum(), again)
    assert torch.equal(of_norm, known)


@needs_loops
@pytest.mark.parametrize(
    ("dtype", "weights", "shape"), cases(DTYPES, (None, torch.float32, torch.bfloat16), ((3, 5, 74), (1, 2)), daily=5)
)
def test_swiglu(dtype: torch.dtype, weights: torch.dtype | None, shape: tuple[int, ...]) -> None:
    both = (3.0 * drawn(*shape, dtype=torch.float32)).to(dtype).transpose(0, -1).contiguous().transpose(0, -1)
    both = both.requires_grad_()
    scale = None if weights is None else drawn(*shape[:-1], dtype=weights, seed=1).requires_grad_()
    out = swiglu(both, scale)
    exact, exact_scale = exactly(both), None if scale is None else exactly(scale)
    gate, up = exact.chunk(2, dim=-1)
    factor = 1.0 if exact_scale is None else exact_scale.unsqueeze(-1)
    expected = torch.nn.functional.silu(gate) * up * factor
    within(out, expected.detach(), expected.detach().abs(), 16)
    grad = drawn(*out.shape, dtype=dtype, seed=2).transpose(0, -1).contiguous().transpose(0, -1)
    made = torch.autograd.grad(out, [both] if scale is None else [both, scale], grad)
    leaves = [exact] if exact_scale is None else [exact, exact_scale]
    known = torch.autograd.grad(expected, leaves, grad.double())
    size = (grad.double() * factor).abs()
    sigmoid = gate.sigmoid()
    terms = torch.cat((size * up.abs() * sigmoid * (1 + gate.abs()), size * gate.abs() * sigmoid), dim=-1)
    within(made[0], known[0], terms.detach(), 16)
    if scale is not None:
        terms = (grad.double() * torch.nn.functional.silu(gate) * up).abs().sum(-1)
        within(made[1], known[1], terms.detach(), 16 + math.log2(shape[-1]))


@needs_loops
def test_swiglu_of_large_numbers_is_finite() -> None:
    both = torch.tensor([[-300.0, 300.0, 2.0, 3.0]]).requires_grad_()
    out = swiglu(both)
    (grad,) = torch.autograd.grad(out.sum(), both)
    assert out.tolist() == [[0.0, 900.0]]
    assert grad.tolist() == [[0.0, 3.0, 0.0, 300.0]]


def angles(kind: str, dtype: torch.dtype, samples: int, sequence: int, pairs: int) -> torch.Tensor | None:
    """A table as `RotaryTable` makes them; that of documents has positions of its own for each sample."""
    if kind == "none":
        return None
    positions = torch.arange(sequence, dtype=torch.float32)[:, None]
    if kind == "documents":
        positions = torch.stack([(torch.arange(sequence) + sample) % 5 for sample in range(samples)])[:, None, :, None]
    at = positions * 1.3 ** -torch.arange(pairs, dtype=torch.float32)
    return torch.stack((at.cos(), at.sin())).to(dtype)


@pytest.mark.parametrize(
    ("sizes", "dtype", "kind", "interleaved", "by_token"),
    cases(((12, 4, 3), (16, 8, 1)), DTYPES, ("positions", "documents", "none"), (False, True), (False, True), daily=11),
)
def test_heads_out_of_their_product(
    sizes: tuple[int, int, int], dtype: torch.dtype, kind: str, interleaved: bool, by_token: bool
) -> None:
    """sizes: channels of a head, pairs of them that are turned, and queries of a group."""
    channels, pairs, per_group = sizes
    sequence, batch, groups = 11, 2, 2
    table = angles(kind, dtype, batch, sequence, pairs)
    packed = drawn(sequence, batch, groups, (per_group + 2) * channels + 4, dtype=dtype)[..., :-4].requires_grad_()
    heads = split_heads(packed, table, channels, interleaved=interleaved, by_token=by_token)
    exact = exactly(packed)
    parts = exact.split([per_group * channels, channels, channels], dim=-1)
    expected = [part.reshape(sequence, batch, -1, channels).permute(1, 2, 0, 3) for part in parts]
    if table is not None:
        expected[:2] = [rotate_reference(x, table.double(), interleaved=interleaved) for x in expected[:2]]
    grads = [drawn(*reversed(head.shape), dtype=dtype, seed=5).permute(3, 2, 1, 0) for head in heads]
    # Each lies in an order of its own; the keys' is read there, channel after channel.
    grads[1] = drawn(sequence, batch, groups, channels, dtype=dtype, seed=6).permute(1, 2, 0, 3)
    grads[2] = grads[2].contiguous()
    for got, known in zip(heads, expected, strict=True):
        assert (got.permute(2, 0, 1, 3) if by_token else got).is_contiguous()
        within(got, known.detach(), torch.full_like(known, 8.0), 4)
    (made,) = torch.autograd.grad(heads, packed, grads)
    (known,) = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    within(made, known, torch.full_like(known, 8.0), 4)
    assert torch.equal(heads[2], packed.detach()[..., -channels:].permute(1, 2, 0, 3)), "values are copied"


@pytest.mark.parametrize(
    ("dtype", "kind", "interleaved", "by_token"),
    cases(DTYPES, ("positions", "documents"), (False, True), (False, True), daily=5),
)
def test_rotation_alone(dtype: torch.dtype, kind: str, interleaved: bool, by_token: bool) -> None:
    sequence, batch, heads, channels, pairs = 11, 2, 3, 20, 6
    table: Any = angles(kind, dtype, batch, sequence, pairs)
    x = drawn(sequence, batch, heads, channels, dtype=dtype).requires_grad_()
    turned = rotate(x.permute(1, 2, 0, 3), table, interleaved=interleaved, by_token=by_token)
    exact = exactly(x)
    expected = rotate_reference(exact.permute(1, 2, 0, 3), table.double(), interleaved=interleaved)
    assert (turned.permute(2, 0, 1, 3) if by_token else turned).is_contiguous()
    within(turned, expected.detach(), torch.full_like(expected, 8.0), 4)
    grad = drawn(*turned.shape, dtype=dtype, seed=3)
    (made,) = torch.autograd.grad(turned, x, grad)
    (known,) = torch.autograd.grad(expected, exact, grad.double())
    assert made.is_contiguous()
    within(made, known, torch.full_like(known, 8.0), 4)


@needs_loops
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [7, 32, 83])
def test_cross_entropy(columns: int, dtype: torch.dtype, spaced: bool) -> None:
    """Of logits far from zero, whose padding is masked as the output layer does it."""
    labels = torch.tensor([0, columns - 4, 3, -100, columns // 2, 1])
    logits = inner_parts((6, columns), dtype, spaced) * 4 + 30 * torch.arange(6, dtype=dtype)[:, None]
    logits[:, columns - 3 :] = torch.finfo(dtype).min
    logits.requires_grad_()
    losses = cross_entropy(logits, labels)
    assert losses.dtype == torch.float32
    exact = exactly(logits)
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    # The log-sum-exp is off by a rounding of its own size, and by those of its terms.
    within(losses, expected.detach(), exact.detach()[:, : columns - 3].abs().amax(-1) + columns, 2)
    grad = drawn(6, dtype=torch.float32, seed=2)
    (made,) = torch.autograd.grad(losses, logits, grad)
    (known,) = torch.autograd.grad(expected, exact, grad.double())
    assert made.dtype == dtype
    scale = exact.detach()[:, : columns - 3].abs().amax(-1, keepdim=True) + columns
    within(made, known, scale.expand_as(known) * known.abs() + grad.abs()[:, None] * 4, 2)
    assert not made[3].any(), "a token without a label has no gradient"
    assert not made[:, columns - 3 :].any(), "nor has what is masked"


@needs_loops
def test_a_loss_that_is_no_number_stays_none() -> None:
    """What guards a run looks for it."""
    for wrong in (float("nan"), float("inf")):
        logits = drawn(2, 70, dtype=torch.float32)
        logits[1, 50] = wrong
        assert cross_entropy(logits, torch.tensor([3, 3])).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_that_lie_apart_are_read_where_they_are(interleaved: bool) -> None:
    """Of the product, of heads, of their gradients and of the table: kernels step from channel to channel by one."""

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.stack((tensor, torch.full_like(tensor, torch.nan)), dim=-1)[..., 0]
        assert made.stride(-1) == 2
        return made

    table: Any = angles("documents", torch.float32, 1, 3, 4)
    packed = drawn(3, 1, 1, 3 * 8, dtype=torch.float32)
    grads = [drawn(1, 1, 3, 8, dtype=torch.float32, seed=seed) for seed in range(3)]
    results: list[list[torch.Tensor]] = []
    for form in (torch.Tensor.contiguous, apart):
        given = form(packed).requires_grad_()
        heads = split_heads(given, form(table), 8, interleaved=interleaved)
        results.append([*heads, *torch.autograd.grad(heads, given, [form(grad) for grad in grads])])
        given = form(grads[0]).requires_grad_()
        turned = rotate(given, form(table), interleaved=interleaved)
        results[-1] += [turned, *torch.autograd.grad(turned, given, form(grads[0]))]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_launch_says_how_products_and_sums_are_rounded() -> None:
    """And there is none where there is nothing to compute, which a GPU would refuse."""
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **constants: launched.append((grid, given, constants))

    for grid in ((3, 2), (0,), (3, 0), (3, 2, 0)):
        kernel_choice.launch(Kernel(), grid, "x", BLOCK=4)
    assert launched == [((3, 2), ("x",), {"enable_fp_fusion": True, "BLOCK": 4})]


def test_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        here, double, widest, wide = (
            torch.empty(2, columns, dtype=dtype, device="cuda")
            for columns, dtype in (
                (8, torch.float16),
                (8, torch.float64),
                (kernel_choice.WIDEST, torch.float32),
                (kernel_choice.WIDEST + 1, torch.float32),
            )
        )
    assert not kernel_choice.take(here), "before anybody says so"
    monkeypatch.setattr(kernel_choice, "_used", True)
    assert (kernel_choice.take(here), kernel_choice.take_rows(here)) == (True, True)
    assert not kernel_choice.take(torch.ones(2)), "a CPU computes by itself"
    assert not kernel_choice.take(double)
    assert kernel_choice.take_rows(widest)
    assert (kernel_choice.take(wide), kernel_choice.take_rows(wide)) == (True, False)
    with torch.inference_mode():
        assert not kernel_choice.take(here)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernel_choice.take(here)


@needs_loops
def test_nothing_is_launched_for_no_tokens() -> None:
    """An expert may have none."""
    both = torch.empty(0, 8, requires_grad=True)
    weights = torch.empty(0, requires_grad=True)
    made = torch.autograd.grad(swiglu(both, weights).sum(), (both, weights))
    assert [tuple(gradient.shape) for gradient in made] == [(0, 8), (0,)]
    x, weight = torch.empty(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    made = torch.autograd.grad(rms_norm(x, weight, EPS).sum(), (x, weight))
    assert torch.equal(made[1], torch.zeros(8))


class Elements:
    """Elements that the kernels read and write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = self.written = 0
        load, store = interpreter.load, interpreter.store

        def counted_load(places: Any, mask: Any, *rest: Any) -> Any:
            self.read += int(mask.sum())
            return load(places, mask, *rest)

        def counted_store(places: Any, value: Any, mask: Any) -> Any:
            self.written += int(mask.sum())
            return store(places, value, mask)

        monkeypatch.setattr(interpreter, "load", counted_load)
        monkeypatch.setattr(interpreter, "store", counted_store)


MANY = ((3,), (37, 5), (1,), (700,))
"""Shapes; after the first, addresses are multiples of 4 bytes alone."""


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Elements:
    monkeypatch.setattr(many_kernels, "_BLOCK", 64)
    monkeypatch.setattr(many_kernels, "_PROGRAMS", 3)
    return Elements(monkeypatch)


def parts_of_a_buffer(seed: int) -> list[torch.Tensor]:
    """Tensors one after another in a buffer, with a gap before each that nobody may touch."""
    sizes = [1 + math.prod(shape) for shape in MANY]
    pieces = drawn(sum(sizes), dtype=torch.float32, seed=seed).split(sizes)
    return [piece[1:].view(shape) for piece, shape in zip(pieces, MANY, strict=True)]


@pytest.mark.parametrize("factor", [0.123456789, 0.0, 1.0, math.inf])
def test_many_tensors_are_scaled_unless_by_one(factor: float, many: Elements) -> None:
    """With torch's bits; by one the programs read the factor and nothing else, whatever lies there."""
    tensors, share = parts_of_a_buffer(0), torch.tensor(factor)
    whole = torch.as_strided(tensors[0], (sum(one.numel() + 1 for one in tensors),), (1,), 0)
    expected = whole.clone()
    for one in tensors:
        expected.as_strided(one.shape, one.stride(), one.storage_offset()).mul_(share)
    many_kernels.scale_(tensors, share)
    assert torch.equal(whole, expected)
    elements, programs = sum(one.numel() for one in tensors), len(tensors) * 3
    scaled = factor != 1.0
    assert (many.written, many.read) == (elements * scaled, elements * scaled + programs * (3 if scaled else 1))


@pytest.mark.parametrize("share", [1e-3, 0.3, 0.7, 1.0, 0.0])
def test_many_tensors_move_towards_others_unless_by_nothing(share: float, many: Elements) -> None:
    """Within the roundings of torch's formula, a product and two sums, which a GPU contracts and numpy does not."""
    tensors, ends = parts_of_a_buffer(0), parts_of_a_buffer(1)
    before = [one.double() for one in tensors]
    many_kernels.lerp_(tensors, ends, torch.tensor(share))
    by = torch.tensor(share).double()
    for got, old, end in zip(tensors, before, ends, strict=True):
        within(got, old + by * (end.double() - old), old.abs() + end.double().abs(), 3)
    elements, programs = sum(one.numel() for one in tensors), len(tensors) * 3
    moved = share != 0.0
    assert (many.written, many.read) == (elements * moved, 2 * elements * moved + programs * (4 if moved else 1))


def test_a_share_of_one_is_the_end(many: Elements) -> None:
    tensors, ends = parts_of_a_buffer(0), parts_of_a_buffer(1)
    many_kernels.lerp_(tensors, ends, torch.tensor(1.0))
    assert all(map(torch.equal, tensors, ends))


def test_who_takes_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 without gaps alone, and never a CPU's; the host reads no number of the device."""
    taken: list[str] = []
    monkeypatch.setattr(many_kernels, "scale_", lambda tensors, _factor: taken.append(f"scaled {len(tensors)}"))
    monkeypatch.setattr(many_kernels, "lerp_", lambda tensors, _ends, _share: taken.append(f"moved {len(tensors)}"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        plain = [torch.empty(8, 4, device="cuda") for _ in range(3)]
        half, turned = plain[0].bfloat16(), plain[0].t()
        share = torch.empty((), device="cuda")
        many_tensors.scale_(plain, share)
        monkeypatch.setattr(kernel_choice, "_used", True)
        for tensors in (plain, [*plain, turned], [half], [torch.empty(3)]):
            many_tensors.scale_(tensors, share.to(tensors[0].device))
        many_tensors.lerp_(plain, plain, share)
        many_tensors.lerp_([half], [half], share)
        many_tensors.lerp_(plain, plain, 0.5)
    assert taken == ["scaled 3", "moved 3"]


MEASURED = [gpu_operations.norms, gpu_operations.heads, gpu_operations.activation, gpu_operations.losses_of_tokens]


@needs_loops
@pytest.mark.parametrize("measured", MEASURED)
def test_the_gpu_session_measures_them_beside_torchs(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures of a GPU have another exactness in bf16; here they are there, and near."""
    monkeypatch.setattr(gpu_operations, "_milliseconds", lambda call, _device: float(len(call())))
    found = measured("cpu")
    assert found
    names = {name.split(", ", 1)[1] for name in found if name.startswith("error beyond")}
    for name in names:
        ours, plain = found[f"off, {name}"], found[f"off, plain, {name}"]
        assert 0.0 < plain < 0.01
        assert 0.0 < ours < 0.01
        assert found[f"error beyond torch's, {name}"] == max(0.0, ours - plain)
        assert found[f"ms, {name}"] == found[f"ms, plain, {name}"] > 1.0, "as many results and gradients"


def test_the_gpu_session_measures_updates_beside_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_operations, "_milliseconds", lambda call, _device: call() or 1.0)
    found = gpu_operations.updates("cpu")
    other = {name.removeprefix("other bits, "): bits for name, bits in found.items() if name.startswith("other bits")}
    assert other.keys() == {"scale by 0.7", "scale by 1", "average by 0.001", "average by 0"}
    assert [other[name] for name in ("scale by 0.7", "scale by 1", "average by 0")] == [0, 0, 0]
    assert all(figure < 1e-6 for name, figure in found.items() if name.startswith("error"))
