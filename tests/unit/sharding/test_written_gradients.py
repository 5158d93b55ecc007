"""Buffers that no step zeroes: the first gradient of each weight is written over what is there, which is NaN here.

Weights and inputs are small integers, so that every sum is exact, in 16 bits too, in whatever order it is made.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch.utils.checkpoint import checkpoint

from megatron_ext import device
from megatron_ext.device.kernels import linear
from megatron_ext.device.weight_gradients import add_
from megatron_ext.errors import TrainingError
from megatron_ext.model.config import transformer_config
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parallel import groups
from megatron_ext.sharding.written_gradients import WritingDataParallel
from tests.support.several_models import end_layout
from tests.support.small_models import LLAMA, build_small_model, small_config

NAN = float("nan")


class _Linear(torch.nn.Linear):
    """Multiplies as the layers of a model do, which write first gradients in fp32 where they belong."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class _Model(torch.nn.Module):
    """One weight that every microbatch uses twice, others that some microbatches use, or none, and a frozen one."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.twice = _Linear(6, 6, bias=False, dtype=dtype)
        self.sometimes = _Linear(6, 3, dtype=dtype)
        self.never = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
        self.frozen = torch.nn.Parameter(torch.zeros(7, dtype=dtype), requires_grad=False)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(_integers(parameter.shape, seed))

    def forward(self, microbatch: str, seed: int, recompute: bool = False) -> torch.Tensor:
        """`microbatch` is "all", or "some" without the weights of `sometimes`."""
        x = _integers((1, 6), seed + 10).to(self.twice.weight.dtype).requires_grad_()
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True) if recompute else self.twice(x)
        y = self.sometimes(x) if microbatch == "all" else x
        return y.sum()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def _integers(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randint(-1, 2, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def _wrapped(model: torch.nn.Module, **settings: Any) -> Any:
    config = small_config()
    return WritingDataParallel(
        writes=True,
        config=transformer_config(config, "cpu"),
        ddp_config=DistributedDataParallelConfig(**settings),
        module=model,
        pg_collection=groups.initialize(config.layout, device.current()),
    )


def _spoil(chunk: Any) -> None:
    """What a bad step may leave: NaN in every gradient."""
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(NAN)


def _step(chunk: Any, microbatches: Sequence[str], **how: Any) -> None:
    chunk.zero_grad_buffer()
    for seed, microbatch in enumerate(microbatches):
        with nullcontext() if seed == len(microbatches) - 1 else chunk.no_sync():
            chunk(microbatch, seed, **how).backward()
    chunk.finish_grad_sync()


def _expected(model: _Model, microbatches: Sequence[str]) -> dict[str, torch.Tensor]:
    """Sums of what autograd gives for each microbatch, by name; zero where it gives nothing."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums = {name: torch.zeros(parameter.shape) for name, parameter in trained.items()}
    for seed, microbatch in enumerate(microbatches):
        gradients = torch.autograd.grad(model(microbatch, seed), [*trained.values()], allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            sums[name] += 0.0 if gradient is None else gradient
    return sums


def _found(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    trained: list[tuple[str, Any]] = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    return {name: weight.main_grad.float().clone() for name, weight in trained}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


STEPS = [("all", "all"), ("some",), (), ("some", "all"), ("all",), ("some", "some")]
"""Microbatches of each step: a weight gets its first gradient in the first one, in a later one, or not at all."""


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "bf16, summed in fp32"])
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "divided"])
def test_nothing_of_the_step_before_is_left(dtypes: str, distributed: bool) -> None:
    """Neither after the reduction nor for who looks at the gradients before it, and padding is zero."""
    model = _Model(torch.float32 if dtypes == "fp32" else torch.bfloat16)
    in_fp32 = dtypes.endswith("in fp32")
    chunk = _wrapped(model, grad_reduce_in_fp32=in_fp32, use_distributed_optimizer=distributed)
    seen: dict[str, torch.Tensor] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    look = SimpleNamespace(
        before_reduction=lambda given: seen.update({names[id(one)]: one.main_grad.float().clone() for one in given})
    )
    chunk.watchers.append(look)
    for microbatches in STEPS:
        _spoil(chunk)
        expected = _expected(model, microbatches)
        _step(chunk, microbatches)
        _assert_equal(_found(model), expected)
        _assert_equal(seen, expected)
        seen.clear()
    [buffer] = chunk.buffers
    assert (buffer.numel > buffer.numel_unpadded) == distributed
    for parameter in buffer.params:
        parameter.main_grad.zero_()
    assert not buffer.grad_data.any(), "padding is zero"
    assert len(buffer.params) == 4, "a frozen weight has no part in it"


def test_a_bucket_is_reduced_as_soon_as_it_is_complete() -> None:
    """Two buckets, reduced inside the backward pass of the last microbatch, from the second step on."""
    model = _Model(torch.float32)
    model.never.requires_grad_(False)  # megatron-core wants a gradient of every weight where reductions overlap
    chunk = _wrapped(model, overlap_grad_reduce=True, bucket_size=10)
    assert len(chunk.bucket_groups) == 2
    started: list[dict[str, torch.Tensor]] = []
    look = SimpleNamespace(before_reduction=lambda given: started.append(_found(model)))
    chunk.watchers.append(look)
    for number, microbatches in enumerate([("all", "all"), ("all",), ("some", "all"), ("all", "all", "all")]):
        _spoil(chunk)
        expected = _expected(model, microbatches)
        started.clear()
        _step(chunk, microbatches)
        _assert_equal(_found(model), expected)
        assert len(started) == 2, "each bucket once"
        first_is_alone = bool(started[0]["twice.weight"].isnan().all()) or not torch.equal(
            started[0]["twice.weight"], expected["twice.weight"]
        )
        assert first_is_alone == (number > 0), "the last layer's bucket is reduced before the rest has its gradients"
        assert torch.equal(started[0]["sometimes.weight"], expected["sometimes.weight"])


def test_gradients_that_come_in_pieces_are_added() -> None:
    """Recomputed, both uses of a weight have a backward pass of their own, and each brings a gradient."""
    model = _Model(torch.float32)
    chunk = _wrapped(model)
    came: list[torch.Tensor] = []
    model.twice.weight.register_post_accumulate_grad_hook(lambda weight: came.append(weight))
    for microbatches in (("all", "all"), ("some",)):
        _spoil(chunk)
        expected = _expected(model, microbatches)
        came.clear()
        _step(chunk, microbatches, recompute=True)
        assert len(came) == 2 * len(microbatches)
        _assert_equal(_found(model), expected)


def test_a_backward_pass_that_fails_leaves_nothing() -> None:
    model = _Model(torch.float32)
    chunk = _wrapped(model)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in the middle")

    handle = model.twice.weight.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        _step(chunk, ("all",))
    handle.remove()
    assert model.sometimes.weight.main_grad.any(), "it came to the last layer"  # pyright: ignore
    _step(chunk, ("some", "some"))
    _assert_equal(_found(model), _expected(model, ("some", "some")))


class _AddsItself(torch.autograd.Function):
    """What layers of other packages do with a main gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Any, adds: Any) -> torch.Tensor:
        ctx.weight, ctx.adds = weight, adds
        return weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.adds(ctx.weight.main_grad, grad)
        ctx.weight.grad_added_to_main_grad = True
        return torch.empty_like(grad), None


def test_a_gradient_that_a_layer_adds_by_itself_is_not_lost_unsaid() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    chunk = _wrapped(torch.nn.ParameterList([weight]))
    for adds in (add_, torch.Tensor.add_):
        _spoil(chunk)
        chunk.zero_grad_buffer()
        _AddsItself.apply(weight, adds).sum().backward()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        with (
            pytest.raises(TrainingError, match=r"a weight \(3,\) to its main_grad itself")
            if adds != add_
            else nullcontext()
        ):
            chunk.finish_grad_sync()
            assert weight.main_grad.tolist() == [1.0, 1.0, 1.0]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_hook_without_a_gradient_leaves_nothing_of_the_step_before() -> None:
    """Whoever takes the gradient away before the hook asks for it has not written it."""
    weight = torch.nn.Parameter(torch.ones(3))
    chunk = _wrapped(torch.nn.ParameterList([weight]))
    _spoil(chunk)
    chunk.zero_grad_buffer()
    assert weight.grad is None
    chunk._make_backward_post_hook(weight)()
    chunk.finish_grad_sync()
    assert weight.main_grad.tolist() == [0.0, 0.0, 0.0]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_zero_is_that_of_a_sum_with_zeros() -> None:
    """-0.0 + 0.0 is 0.0, and a copy would be -0.0: SGD's momentum would save its bits."""
    weight = torch.nn.Parameter(torch.ones(3))
    chunk = _wrapped(torch.nn.ParameterList([weight]))
    chunk.zero_grad_buffer()
    (weight * -0.0).sum().backward()
    chunk.finish_grad_sync()
    main_grad: torch.Tensor = weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]
    assert main_grad.tolist() == [0.0, 0.0, 0.0]
    assert not main_grad.signbit().any()


# bf16 is slow: the marks of first gradients are the same.
@pytest.mark.parametrize("training", [{}, pytest.param({"bf16": True}, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["tied, biases", "untied"])
@pytest.mark.parametrize("fused", [False, True], ids=["by hooks", "by products"])
def test_a_models_gradients_have_the_bits_of_sums_with_zeros(
    model: dict[str, Any], fused: bool, training: dict[str, Any]
) -> None:
    """With tied embeddings and `fused` the output layer's product writes, and the embedding's gradient is added; norms,
    biases and embeddings are written by hooks in any case."""
    config = small_config({**model, "num_layers": 2}, training={"gradient_accumulation_fusion": fused, **training})

    def two_steps(*, writes: bool) -> list[dict[str, torch.Tensor]]:
        [gpt], pg_collection = build_small_model(config)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        core = gpt.config
        chunk: Any = WritingDataParallel(
            writes=writes, config=core, ddp_config=settings, module=gpt, pg_collection=pg_collection
        )
        found = []
        for microbatches in (2, 1):
            if writes:
                _spoil(chunk)
            chunk.zero_grad_buffer()
            for seed in range(microbatches):
                tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(seed))
                chunk(tokens[:, :-1], torch.arange(16).expand(2, 16), labels=tokens[:, 1:]).sum().backward()
            chunk.finish_grad_sync()
            found.append({name: weight.main_grad.clone() for name, weight in global_named_parameters([chunk])})  # pyright: ignore
        end_layout()
        return found

    for found, expected in zip(two_steps(writes=True), two_steps(writes=False), strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found[name].view(torch.int32), gradient.view(torch.int32)), name
