"""Run by test_cuda_path.py in a process where CUDA means CUDA: torch's fake tensors, whose operators check no more than
schema, shapes and types, but those as a GPU's would."""

import inspect
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.data.microbatch import StageView, collate, divide, padding_sample
from megatron_ext.data.packing import Documents, Segment, documents_of
from megatron_ext.device import cuda
from megatron_ext.optim.gradient_norm import clipping_share, global_norm, replace_loops, scale_gradients
from megatron_ext.optim.torch_optimizer import mask_by, torch_optimizer
from megatron_ext.parts.attention import flex
from megatron_ext.parts.attention.blocks import block_backward, block_forward
from megatron_ext.parts.attention.scores import Scores
from megatron_ext.parts.attention.segments import attend_documents, attend_segments
from megatron_ext.plugins.rank_times.measures import Stragglers
from megatron_ext.resilience.numeric import largest_magnitude
from tests.support.fake_tensors import on_gpu
from tests.support.operator_calls import Calls, aten


def described(value: Any) -> Any:
    """What a kernel can see of an argument without its contents."""
    return (value.dtype, tuple(value.shape), value.device.type) if isinstance(value, torch.Tensor) else value


def test_the_backward_kernel_gets_what_the_forward_kernel_gives() -> None:
    with FakeTensorMode(), Calls() as calls:
        query = torch.empty(2, 4, 16, 32, device="cuda", dtype=torch.bfloat16)
        key = query.new_empty(2, 4, 24, 32)
        out, log_sum_exp = block_forward(query, key, key, causal=False, scale=0.1)
        gradients = block_backward(out, query, key, key, out, log_sum_exp, causal=False, scale=0.1)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]
    _, given = calls.of(aten._scaled_dot_product_flash_attention)
    taken, _ = calls.of(aten._scaled_dot_product_flash_attention_backward)
    names = [argument.name for argument in aten._scaled_dot_product_flash_attention_backward.default._schema.arguments]
    by_name = dict(zip(names, map(described, taken), strict=False))
    # output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask
    for name, returned in zip(("cum_seq_q", "cum_seq_k", "max_q", "max_k"), given[2:6], strict=True):
        assert by_name[name] == described(returned), name
    assert (by_name["philox_seed"], by_name["philox_offset"]) == (described(given[6]), described(given[7]))


def packed(group_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Documents]:
    """Fake heads of two samples of 16 tokens on a GPU, and their documents."""
    tokens = torch.arange(32).view(2, 16) % 5
    documents = documents_of(tokens, eod=4)
    with FakeTensorMode() as fake:
        query = torch.empty(2, 4, 16, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        key = torch.empty(2, 4 // group_size, 16, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return (query, key, key), documents.map(lambda tensor: fake.from_tensor(tensor).cuda())


def without_grouped_queries(*arguments: Any, return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1)):
    """The signature of torch 2.11."""
    query, key, value = arguments[:3]
    assert key.shape == value.shape == query.shape
    return torch.empty_like(query)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("old", [False, True])
def test_packed_documents_are_called_as_each_torch_has_it(
    group_size: int, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        monkeypatch.setattr(varlen, "varlen_attn", without_grouped_queries)
    heads, documents = packed(group_size)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_args: (9, 0))
    with heads[0].fake_mode:  # pyright: ignore[reportAttributeAccessIssue]
        assert attend_documents(*heads, documents, 0.1).shape == heads[0].shape


def test_plain_heads_pass_no_argument_that_an_older_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[dict[str, Any]] = []

    def recorded(*arguments: Any, **options: Any) -> torch.Tensor:
        passed.append(options)
        return torch.empty_like(arguments[0])

    monkeypatch.setattr(varlen, "varlen_attn", recorded)
    heads, documents = packed(1)
    with heads[0].fake_mode:  # pyright: ignore[reportAttributeAccessIssue]
        attend_documents(*heads, documents, 0.1)
    assert passed[0].keys() == {"scale", "window_size"}


def test_cudnn_is_told_that_keys_and_queries_end_together() -> None:
    """By the identity of the two tensors (torch.nn.attention.varlen), which a copy to the device must keep."""
    rows = [{**padding_sample(16), "tokens": torch.arange(16) % 5, "labels": torch.arange(16)} for _ in range(2)]
    view = StageView(eod=4, separates_documents=True)
    documents = divide(collate(rows, view), view).to("meta").documents
    assert documents is not None
    assert documents.key_ends is documents.query_ends
    divided = documents_of(torch.arange(32).view(2, 16) % 5, 4, cp_rank=1, cp_size=2)
    assert divided.key_ends is not divided.query_ends
    if "_cudnn_rejection_reasons" in vars(varlen):  # absent in torch 2.11, which never takes cuDNN here
        heads, packed_documents = packed(1)
        ends = packed_documents.query_ends, packed_documents.key_ends
        query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in heads)
        reasons = varlen._cudnn_rejection_reasons(query, key, value, *ends, packed_documents.longest[0], [-1, 0])
        assert not [reason for reason in reasons if "same cu_seq" in reason]


def test_a_gpu_is_bound_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "a GPU")
    monkeypatch.setattr(torch.distributed, "all_reduce", reduced.append)
    with FakeTensorMode():
        here = cuda.CudaDevice(0)
        here.bind_thread()
        here.bind_group()
    assert current == [torch.device("cuda", 0)] * 2
    assert reduced[0].device == torch.device("cuda", 0)


OTHER_SCORES = Scores(cap=30.0), Scores(slopes=(0.5, 0.25, 0.1, 0.05)), Scores(sink_H=0.0)


@pytest.mark.parametrize("scores", OTHER_SCORES, ids=str)
def test_other_scores_are_computed_on_the_gpu(scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    """By flex_attention, which here runs as it is: torch.compile makes its kernel for a GPU alone."""
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    with FakeTensorMode(), torch.no_grad():
        query = on_gpu(2, 4, 160, 32)
        key, value = on_gpu(2, 2, 160, 32), on_gpu(2, 2, 160, 24)
        if scores.sink_H is not None:
            scores = replace(scores, sink_H=on_gpu(4, dtype=torch.float32))
        out = attend_segments(query, key, value, (Segment(0, 70, 0, 70), Segment(70, 90, 70, 90)), 0.1, 64, scores)
    assert described(out) == (torch.bfloat16, (2, 4, 160, 24), "cuda")


def test_varlen_signature_is_the_one_that_is_read() -> None:
    """`varlen_causal` looks at the parameters of torch's own function."""
    assert {"scale", "window_size"} <= inspect.signature(varlen.varlen_attn).parameters.keys()


def test_numbers_are_copied_at_once_and_waited_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    event = SimpleNamespace(record=lambda: heard.append("recorded"), synchronize=lambda: heard.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    with FakeTensorMode(), Calls() as calls:
        read = object.__new__(cuda.CudaDevice).read_later(torch.empty(8, dtype=torch.float64, device="cuda"))
        copied, source, non_blocking = calls.of(aten.copy_)[0]
        assert (copied.device.type, source.device.type, non_blocking) == ("cpu", "cuda", True)
        assert heard == ["recorded"]
        monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [*heard, tensor is copied])
        assert read() == ["recorded", "wait", True]


def test_ranks_send_their_times_without_waiting_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the GPU waits for all that it was given before, unless it is told not to."""
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda *tensors, async_op: sent.append(tensors))
    sent: list[Any] = []
    waits: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (aten._to_copy.default, aten.copy_.default):
                waits.append(not (kwargs or {}).get("non_blocking", False))
            return func(*args, **(kwargs or {}))

    stragglers: Any = object.__new__(Stragglers)
    stragglers._clock = SimpleNamespace(take_compute=lambda: [])
    stragglers._run = SimpleNamespace(world_size=2, device=SimpleNamespace(torch_device=torch.device("cuda")))
    stragglers._steps, stragglers._known, stragglers._times, stragglers._under_way = 4, 0, deque(), deque()
    with FakeTensorMode(), Copies():
        stragglers._begin()
    [(times, own)] = sent
    assert (times.device.type, own.device.type, len(times), len(own)) == ("cuda", "cuda", 8, 4)
    assert waits == [False]


def test_norm_clipping_and_masked_updates_stay_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has no values: what reads one raises."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)
    replace_loops()
    gpu = torch.device("cuda")
    with FakeTensorMode(), Calls() as calls:
        weights = [torch.nn.Parameter(torch.empty(8, 4, device=gpu)) for _ in range(3)]
        gradients = [torch.empty_like(weight) for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        part: Any = SimpleNamespace(
            get_parameters=lambda: weights,
            get_grads_for_grad_norm=lambda: gradients,
            get_grad_stats_parallel_group=lambda: None,
        )
        found_inf = torch.zeros((), device=gpu)
        optimizer = torch_optimizer(OptimizerConfig(optimizer="adam", lr=0.1))([{"params": weights}])
        mask_by(optimizer, found_inf)
        chained: Any = SimpleNamespace(chained_optimizers=[part])
        norm = global_norm(chained, gpu).on_device()
        bad = ~(norm.isfinite() & largest_magnitude(gradients, gpu).isfinite())
        torch.maximum(found_inf, bad.float(), out=found_inf)
        scale_gradients(chained, clipping_share(1.0, norm))
        optimizer.step()
    called = {str(operator) for operator, _, _ in calls.calls}
    assert {"aten._foreach_mul_.Tensor", "aten._fused_adamw_.default", "aten._foreach_sub_.List"} <= called
    on_host = [one for *_, one in calls.calls if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    assert not on_host
