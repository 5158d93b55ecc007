"""Capped scores, slopes and sinks: as one mask over everything has them, with gradients, in blocks of any size."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.data.packing import Segment
from megatron_ext.parts.attention.describe import Softmax
from megatron_ext.parts.attention.flex import attend_flex
from megatron_ext.parts.attention.scores import Scores, forward, with_sink
from megatron_ext.parts.attention.segments import attend_segments
from tests.support.masked_attention import attend_segments_reference

SEGMENTS = (Segment(0, 70, 0, 70), Segment(70, 20, 60, 30), Segment(90, 10, 100, 10))
"""More queries than are computed at once; some whose document began on another rank; a document of its own."""

KINDS = {
    "sink": {"sink": True},
    "cap": {"cap": 0.5},
    "slopes": {"slopes": (0.5, 0.25, 0.0625, 1.0)},
    "all": {"cap": 0.5, "slopes": (0.5, 0.25, 0.0625, 1.0), "sink": True},
}


def _heads() -> Any:
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, 100, 8), (2, 2, 110, 8), (2, 2, 110, 6), (4,)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)


def _scores(kind: str, sink: torch.Tensor) -> Scores:
    asked = KINDS[kind]
    return Scores(asked.get("cap"), asked.get("slopes"), sink if asked.get("sink") else None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("window", [None, 7, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_as_one_mask_has_them(kind: str, window: int | None) -> None:
    query, key, value, sink = _heads()
    heads = query, key, value
    scores = _scores(kind, sink)
    found = attend_segments(*heads, SEGMENTS, 0.7, window, scores)
    expected = attend_segments_reference(*heads, SEGMENTS, 0.7, window, scores)
    assert float((found - expected).abs().max()) < 1e-12
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = [*heads, *([] if scores.sink_H is None else [sink])]
    of_found, of_expected = (torch.autograd.grad((out * weight).sum(), wanted) for out in (found, expected))
    for one, other in zip(of_found, of_expected, strict=True):
        assert float((one - other).abs().max()) < 1e-11


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_functions_of_a_gpu_give_the_same(kind: str, window: int | None) -> None:
    with torch.no_grad():
        query, key, value, sink = _heads()
        heads = query, key, value
        query, key, value, sink = (tensor.float() for tensor in (*heads, sink))
        scores = _scores(kind, sink)
        for row in range(2):
            one = query[row : row + 1], key[row : row + 1], value[row : row + 1]
            found = attend_flex(*one, SEGMENTS, 0.7, window, scores, compiled=False)
            expected = attend_segments_reference(*one, SEGMENTS, 0.7, window, scores)
            assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_16_bits_are_those_of_32_rounded(kind: str) -> None:
    query, key, value, sink = (tensor.detach().bfloat16() for tensor in _heads())
    heads = query, key, value
    found = attend_segments(*heads, SEGMENTS, 0.7, None, _scores(kind, sink))
    expected = attend_segments(
        query.float(), key.float(), value.float(), SEGMENTS, 0.7, None, _scores(kind, sink.float())
    )
    assert found.dtype == torch.bfloat16
    assert float((found - expected).abs().max()) < 0.02


def test_no_more_than_a_few_rows_of_scores_are_held() -> None:
    query = torch.randn(1, 1, 640, 4)
    shapes = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            shapes.extend(one.numel() for one in (out if isinstance(out, tuple) else (out,)) if hasattr(one, "numel"))
            return out

    with Shapes():
        scores = Scores(cap=1.0, slopes=(0.5,), sink_H=torch.zeros(1))
        attend_segments(query, query, query, (Segment(0, 640, 0, 640),), 0.5, None, scores)
    assert 64 * 640 <= max(shapes) < 640 * 640 // 2


def test_a_sink_is_one_more_key_without_a_value() -> None:
    query, key, value, sink = _heads()
    heads = query, key, value
    out, log_sum_exp = with_sink(*forward(*heads, causal=False, scale=0.7), sink)
    key, value = (tensor.repeat_interleave(2, 1) for tensor in heads[1:])
    logits = torch.cat((heads[0] @ key.mT * 0.7, sink[:, None, None].expand(2, 4, 100, 1)), -1)
    assert torch.allclose(log_sum_exp, logits.logsumexp(-1), atol=1e-13, rtol=0)
    assert torch.allclose(out, logits.softmax(-1)[..., :-1] @ value, atol=1e-13, rtol=0)


def test_slopes_are_those_of_the_paper() -> None:
    # arXiv:2108.12409, section 3: 8 heads begin at 1/2, 16 at 1/sqrt(2); others as in its published code.
    def published(heads: int) -> list[float]:
        if math.log2(heads).is_integer():
            start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
            return [start * start**number for number in range(heads)]
        closest = 2 ** math.floor(math.log2(heads))
        return published(closest) + published(2 * closest)[0::2][: heads - closest]

    for heads in (1, 2, 3, 6, 8, 12, 16, 25, 112):
        assert Softmax(has_slopes=True).slopes(heads) == pytest.approx(published(heads), rel=1e-14)
    assert Softmax(has_slopes=True).slopes(8)[0] == 0.5  # pyright: ignore[reportOptionalSubscript]
    assert Softmax().slopes(8) is None


def test_ranks_have_the_scores_of_their_heads() -> None:
    whole = Scores(slopes=(0.5, 0.25, 0.125, 0.0625), sink_H=torch.arange(4.0))
    parts = [whole.of_heads(rank, 2) for rank in range(2)]
    assert [part.slopes for part in parts] == [(0.5, 0.25), (0.125, 0.0625)]
    assert [part.sink_H.tolist() for part in parts if isinstance(part.sink_H, torch.Tensor)] == [[0.0, 1.0], [2.0, 3.0]]
