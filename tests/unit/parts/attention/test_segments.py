"""Attention by blocks against attention with one mask, and the kernels against what they compute written out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.data.packing import Segment, documents_of
from megatron_ext.parts.attention import blocks as kernels
from megatron_ext.parts.attention.segments import attend_documents, attend_segments, largest_scores, merge
from tests.support.masked_attention import attend_segments_reference

SCALE = 0.3
SEGMENTS = (Segment(0, 5, 0, 5), Segment(5, 3, 5, 3), Segment(8, 4, 6, 10), Segment(12, 1, 3, 9))


def heads(
    groups: int, dtype: torch.dtype, queries: int = 13, keys: int = 16, value_size: int = 8
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, queries, 8), (2, groups, keys, 8), (2, groups, keys, value_size)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize(("groups", "value_size"), [(1, 8), (2, 8), (4, 8), (2, 4), (4, 12)])
def test_segments_are_attention_with_a_mask(groups: int, value_size: int, dtype: torch.dtype, tolerance: float) -> None:
    query, key, value = heads(groups, dtype, value_size=value_size)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    out = attend_segments(query, key, value, SEGMENTS, SCALE)
    expected = attend_segments_reference(exact[0], exact[1], exact[2], SEGMENTS, SCALE)
    weight = torch.randn_like(expected)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)
    for got, wanted in zip(
        torch.autograd.grad((out * weight.to(dtype)).sum(), (query, key, value)),
        torch.autograd.grad((expected * weight).sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("groups", "value_size"), [(2, 8), (4, 8), (2, 4), (4, 12)])
def test_kernels_equal_what_is_written_out(groups: int, value_size: int, causal: bool) -> None:
    query, key, value = (tensor.detach() for tensor in heads(groups, torch.float64, 12, 12, value_size))
    out, log_sum_exp = kernels.block_forward(query, key, value, causal=causal, scale=SCALE)
    expected = kernels.block_forward_reference(query, key, value, causal=causal, scale=SCALE)
    torch.testing.assert_close((out, log_sum_exp.double()), expected)
    # Of an attention over more keys than these: the result and the log-sum-exp are not this block's own.
    joint = merge(*expected, torch.randn_like(out), expected[1] + 0.5)
    inputs = torch.randn_like(out), query, key, value, joint[0], joint[1]
    torch.testing.assert_close(
        kernels.block_backward(*inputs, causal=causal, scale=SCALE),
        kernels.block_backward_reference(*inputs, causal=causal, scale=SCALE),
    )


def test_blocks_are_put_together_also_where_one_outweighs_the_other() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 12, 8), torch.randn(1, 1, 12, 8)
    key[:, :, 7] *= 1e3
    whole = kernels.block_forward_reference(query, key, value, causal=False, scale=SCALE)
    parts = [
        kernels.block_forward_reference(query, key[:, :, rows], value[:, :, rows], causal=False, scale=SCALE)
        for rows in (slice(0, 5), slice(5, 12))
    ]
    torch.testing.assert_close(merge(*parts[0], *parts[1]), whole)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_documents_take_no_tensor_of_length_squared() -> None:
    torch.manual_seed(0)
    length, channels = 2048, 16
    tokens = torch.randint(0, 300, (2, length))
    tokens[0, 1:] = 1  # one document of a whole sample, and a sample of many
    query, key, value = (torch.randn(2, 2, length, channels, requires_grad=True) for _ in range(3))
    with _Largest() as largest:
        attend_documents(query, key, value, documents_of(tokens, 0), SCALE).sum().backward()
    assert query.numel() <= largest.elements < length * length / 8
    with _Largest() as largest:  # what would not pass
        attend_segments_reference(query, key, value, (Segment(0, length, 0, length),), SCALE)
    assert largest.elements >= length * length


def test_parts_in_fp32_stay_so_with_others_in_16_bits() -> None:
    """Else what a ring adds up would be rounded with every rank's part."""
    out, log_sum_exp = torch.full((1, 1, 2, 4), 1.0 + 2.0**-12), torch.zeros(1, 1, 2)
    for parts in ((out, out.bfloat16()), (out.bfloat16(), out)):
        joint, _ = merge(parts[0], log_sum_exp, parts[1], log_sum_exp)
        assert joint.dtype == torch.float32
        assert torch.equal(joint, torch.full_like(out, 1.0 + 2.0**-13))


def test_gradients_of_many_segments_are_rounded_once() -> None:
    """600 queries of a segment each see the same first keys: in 16 bits the sum would end where one more changes
    nothing."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 1, length, 8, generator=generator).bfloat16().requires_grad_() for length in (600, 4, 4)
    )
    segments = tuple(Segment(row, 1, 0, 4) for row in range(600))
    attend_segments(query, key, value, segments, SCALE).sum().backward()
    # The gradient of a value is the sum of the weights that it has, of all queries, and those of a query are 1.
    assert value.grad is not None
    weights = (query.detach().float() @ key.detach().float().transpose(-1, -2) * SCALE).softmax(-1).sum(2)
    assert weights.min() > 100.0
    torch.testing.assert_close(value.grad.float(), weights[..., None].expand(value.shape), rtol=2.0**-7, atol=0)


def test_documents_are_scaled_as_they_are_told() -> None:
    query, key, value = (torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    whole = documents_of(torch.ones(2, 6, dtype=torch.int64), 0)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.7)
    torch.testing.assert_close(attend_documents(query, key, value, whole, 0.7), expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_largest_score_is_that_of_a_key_that_is_seen(groups: int, window: int | None) -> None:
    query, key, _ = (tensor.detach() for tensor in heads(groups, torch.float64))
    seen = torch.zeros(13, 16, dtype=torch.bool)
    for one in SEGMENTS:
        whole = torch.ones(one.queries, one.keys, dtype=torch.bool).tril(one.keys - one.queries)
        part = whole if window is None else whole.triu(one.keys - one.queries - window + 1)
        seen[one.rows, one.first_key : one.first_key + one.keys] = part
    products = query @ key.repeat_interleave(4 // groups, 1).mT * SCALE
    expected = products.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(largest_scores(query, key, SEGMENTS, SCALE, window), expected.float())
