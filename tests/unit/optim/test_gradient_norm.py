"""Norm and clipping of many gradients: the bits of megatron-core's loops, without reading each back."""

import math
from typing import Any

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.optim.gradient_norm import (
    clipping_share,
    global_norm,
    l2_norm,
    norm_of,
    replace_loops,
    scale_gradients,
)
from tests.support.operator_calls import Calls as OperatorCalls

aten: Any = torch.ops.aten
_LOOP = core_optimizer._multi_tensor_copy_this_to_that


class Calls(TorchDispatchMode):
    """How often the host reads a number of the device, and how many operators there are."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.read += func is aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (7,), (33, 65), (300, 20), (5000,)]
    return [torch.randn(size, generator=generator) * 10**power for power, size in enumerate(sizes, -3)]


def test_the_norm_has_the_bits_of_the_loop() -> None:
    overflow, same, also = torch.zeros(1), gradients(), gradients()
    expected, _ = utils.local_multi_tensor_l2_norm(65536, overflow, [same], False)
    with Calls() as calls:
        norm, of_each = l2_norm(65536, overflow, [also], False)
    assert torch.equal(norm, expected)
    assert (norm.shape, norm.dtype, of_each) == (expected.shape, expected.dtype, None)
    assert calls.read == 0
    assert l2_norm(65536, overflow, [also], True)[1].tolist() == [gradient.norm().item() for gradient in also]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_become_weights_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the optimizer's own method, with the bits of its loop."""
    monkeypatch.setattr(core_optimizer, "_multi_tensor_copy_this_to_that", _LOOP)
    masters, weights = gradients(), [torch.zeros_like(one, dtype=dtype) for one in gradients()]
    part: Any = object.__new__(core_optimizer.Float16OptimizerWithFloat16Params)
    part._dummy_overflow_buf = None if dtype == torch.bfloat16 else torch.ones(1, dtype=torch.int)
    monkeypatch.setattr(type(part), "_get_model_and_main_params_data_float16", lambda _self: (weights, masters))
    part._copy_main_params_to_model_params()
    expected = [weight.clone() for weight in weights]
    assert all(weight.any() for weight in weights)
    for weight in weights:
        weight.zero_()
    replace_loops()
    with OperatorCalls() as calls:
        part._copy_main_params_to_model_params()
    assert all(map(torch.equal, weights, expected))
    assert [str(func) for func, _, _ in calls.calls if "copy" in str(func)] == ["aten._foreach_copy_.default"]
    weights.clear()
    masters.clear()
    part._copy_main_params_to_model_params()  # a rank may have none


def test_kernels_of_a_package_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_grads, "l2_norm_impl", "a package's")
    replace_loops()
    assert clip_grads.l2_norm_impl == "a package's"
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    replace_loops()
    assert clip_grads.l2_norm_impl is l2_norm


class Part:
    """As far as an optimizer of megatron-core's is asked here."""

    get_grad_norm = MegatronOptimizer.get_grad_norm

    def __init__(self, gradients: list[torch.Tensor], group: Any) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.weights.append(torch.nn.Parameter(torch.zeros(2)))  # without a gradient
        self.group, self.config = group, None

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return self.weights

    def get_grad_stats_parallel_group(self) -> Any:
        return self.group

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]


def chained(*groups: Any) -> ChainedOptimizer:
    """Return an optimizer of parts over these groups, each with gradients of another size."""
    parts: Any = [Part([one * 3**n for one in gradients()], group) for n, group in enumerate(groups)]
    return ChainedOptimizer(parts)


@pytest.fixture
def group() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # pyright: ignore
    replace_loops()
    return torch.distributed.group.WORLD


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("same_ranks", [True, False])
def test_the_norm_of_several_optimizers_is_the_engines(others: int, same_ranks: bool, group: Any) -> None:
    """In one sum where their ranks are the same, else of a norm each; experts have other ranks. Nothing is read."""
    groups = [group, *(group if same_ranks else torch.distributed.new_group([0]) for _ in range(others))]
    optimizer = chained(*groups)
    with Calls() as calls:
        norm = global_norm(optimizer, torch.device("cpu"))
        on_device = norm.on_device()
    assert calls.read == 0
    assert norm_of(norm.squares.tolist()) == optimizer.get_grad_norm()
    assert on_device.item() == pytest.approx(norm_of(norm.squares.tolist()), rel=1e-15)
    expected = [gradient for part in optimizer.chained_optimizers for gradient in part.get_grads_for_grad_norm()]
    assert all(one is other for one, other in zip(norm.gradients, expected, strict=True))
    assert norm.of_each is not None
    assert norm.of_each.tolist() == [gradient.norm().item() for gradient in expected]


def test_a_rank_without_gradients_has_the_norm_of_the_others(group: Any) -> None:
    part: Any = Part([], group)
    norm = global_norm(ChainedOptimizer([part]), torch.device("cpu"))
    assert (norm.squares.tolist(), norm.gradients, norm.of_each) == ([0.0], [], None)


@pytest.mark.parametrize("norm", [0.9, 1.0, 3.7, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("most", [1.0, 0.123456789])
def test_clipping_has_the_bits_of_the_engines(norm: float, most: float, group: Any) -> None:
    """With a norm of 1, too: the engine adds 1e-6 to it. A norm that is NaN changes nothing."""
    expected, given = chained(group), chained(group)
    clip_grads.clip_grad_by_total_norm_fp32([*expected.get_parameters()], most, norm)
    with Calls() as calls:
        scale_gradients(given, clipping_share(most, torch.tensor(norm, dtype=torch.float64)))
    assert calls.read == 0
    for one, other in zip(expected.get_parameters(), given.get_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad)
