"""Norm and clipping of many gradients: the bits of megatron-core's loops, without reading each back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.optim.gradient_norm import l2_norm, replace_loops, scale, scale_by
from megatron_ext.sharding.scheme import Sharding

aten: Any = torch.ops.aten


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


def test_norm_and_scale_have_the_bits_of_the_loops() -> None:
    overflow, same, also = torch.zeros(1), gradients(), gradients()
    expected, _ = utils.local_multi_tensor_l2_norm(65536, overflow, [same], False)
    with Calls() as calls:
        norm, of_each = l2_norm(65536, overflow, [also], False)
    assert torch.equal(norm, expected)
    assert (norm.shape, norm.dtype, of_each) == (expected.shape, expected.dtype, None)
    assert calls.read == 0
    assert l2_norm(65536, overflow, [also], True)[1].tolist() == [gradient.norm().item() for gradient in also]  # pyright: ignore[reportOptionalMemberAccess]
    utils.local_multi_tensor_scale(65536, overflow, [same, same], 0.123456789)
    with Calls() as calls:
        scale(65536, overflow, [also, also], 0.123456789)
    assert all(torch.equal(a, b) for a, b in zip(same, also, strict=True))
    assert calls.all == 1


def test_a_factor_on_the_device_gives_the_bits_of_one_on_the_host() -> None:
    for factor in (0.123456789, 1.0, 1e-30):
        on_host, on_device = gradients(), gradients()
        scale(65536, torch.zeros(1), [on_host, on_host], factor)
        parameters = [SimpleNamespace(grad=gradient) for gradient in (*on_device, None)]
        part: Any = SimpleNamespace(get_parameters=lambda parameters=parameters: parameters)
        with Calls() as calls:
            scale_by(part, torch.tensor(factor, dtype=torch.float64).float())
        assert calls.read == 0
        assert all(torch.equal(a, b) for a, b in zip(on_host, on_device, strict=True))


def test_kernels_of_a_package_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("l2_norm_impl", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, "a package's")
    replace_loops()
    assert (clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl) == ("a package's", "a package's")
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    replace_loops()
    assert (clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl) == (l2_norm, scale)


def test_the_norm_of_all_ranks_is_read_once() -> None:
    """As megatron-core calls it; without the replacement it reads every gradient's."""
    given = gradients()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # pyright: ignore
    replace_loops()
    with Calls() as calls:
        norm = clip_grads.get_grad_norm_fp32(given, grad_stats_parallel_group=torch.distributed.group.WORLD)
    assert norm == pytest.approx(torch.cat([gradient.flatten() for gradient in given]).norm().item(), rel=1e-6)
    assert calls.read == 1


class Part:
    """As far as an optimizer of megatron-core's is asked here."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return self.weights


class Chained:
    def __init__(self, *parts: Part) -> None:
        self.chained_optimizers = parts


@pytest.mark.parametrize(("norm", "least_calls"), [(0.9, 0), (1.0, 1), (3.7, 1), (float("nan"), 0)])
@pytest.mark.parametrize("own", [True, False])
def test_clipping_has_the_bits_of_the_engines(
    norm: float, least_calls: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a norm of 1, too: the engine adds 1e-6 to it. By a package's kernel the engine clips."""
    expected, given = Part(gradients()), Part(gradients())
    given.weights.append(torch.nn.Parameter(torch.zeros(2)))  # without a gradient
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    clip_grads.clip_grad_by_total_norm_fp32([*expected.weights], 1.0, norm)
    if own:
        replace_loops()
    chained: Any = Chained(given)
    with Calls() as calls:
        Sharding.clip(None, chained, 1.0, norm)  # pyright: ignore[reportArgumentType]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(expected.weights, given.weights, strict=False))  # pyright: ignore
    assert calls.all == least_calls if own else calls.all >= least_calls
