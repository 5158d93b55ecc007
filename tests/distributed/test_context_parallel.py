"""What context parallelism touches beside the model's numbers, which tests/parity compares."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_ext.data.microbatch import Batch, StageView, divide
from megatron_ext.data.packing import documents_of
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parts.attention import context_parallel
from megatron_ext.parts.attention.segments import attend_documents, attend_segments
from tests.support.resaving import FLAGS, resave, tensors_of

CP2 = ["--context-parallel-size", "2", "--attention-dropout", "0", "--cp-comm-type"]
LENGTH, SCALE, EOD = 32, 0.3, 3


def _chunks_and_attention() -> list[dict[str, Any]]:
    """On one of four ranks: megatron-core's chunks and ours, and how far every exchange is from whole attention, with
    values of the keys' size, of a smaller and of a larger one; and in bf16."""
    torch.distributed.init_process_group("gloo")
    exact = [_far_from_whole(value_size, torch.float64) for value_size in (8, 4, 12)]
    return [*exact, _far_from_whole(8, torch.bfloat16)]


def _far_from_whole(value_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """In fp64 the largest difference of the result and the gradients; in bf16 the root of the mean of its square, in
    units of what one rounding of each number makes of it: 0.42 x 2^-8 (tests/unit/parts/attention/test_compute.py)."""
    group: Any = torch.distributed.group.WORLD
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 12, (2, LENGTH), generator=generator)
    view = StageView(cp_rank=rank, cp_size=size)
    core = get_batch_on_this_cp_rank({"tokens": tokens}, False, group)["tokens"]
    ours = divide(Batch(tokens=tokens), view).tokens
    result: dict[str, Any] = {"chunks": torch.equal(core, torch.as_tensor(ours))}

    def held(whole_BHSD: torch.Tensor) -> torch.Tensor:
        return context_parallel._in_chunks(whole_BHSD, size)[rank]

    shapes = (2, 8, LENGTH, 8), (2, 4, LENGTH, 8), (2, 4, LENGTH, value_size)
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (2, 8, LENGTH, value_size))
    ]
    query, key, value, weight = (tensor.to(dtype).double() for tensor in drawn)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    packed, own = documents_of(tokens, EOD), documents_of(tokens, EOD, rank, size)
    plain = partial(attend_segments, segments=context_parallel.segments_of_rank(0, 1, LENGTH), scale=SCALE)
    by_document = partial(attend_documents, documents=packed, scale=SCALE)
    kinds: dict[str, tuple[Any, Any]] = {
        "p2p": (partial(context_parallel.attend_ring, group=group, scale=SCALE), plain),
        "all_gather": (partial(context_parallel.attend_gathered, group=group, scale=SCALE), plain),
        "a2a": (partial(context_parallel.attend_by_heads, group=group, attend=plain), plain),
        "a2a, packed": (partial(context_parallel.attend_by_heads, group=group, attend=by_document), by_document),
        "all_gather, packed": (
            lambda q, k, v: attend_documents(q, *context_parallel.all_positions(k, v, group), own, SCALE),
            by_document,
        ),
    }
    for kind, (divided, whole) in kinds.items():
        expected = whole(query, key, value)
        expected_gradients = torch.autograd.grad((expected * weight).sum(), (query, key, value))
        # As attention hands them over: permuted, not contiguous.
        heads = [held(t.detach()).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in (query, key, value)]
        heads = [tensor.to(dtype) for tensor in heads]
        out = divided(*(tensor.requires_grad_() for tensor in heads))
        gradients = torch.autograd.grad((out * held(weight).to(dtype)).sum(), heads)
        assert {tensor.dtype for tensor in (out, *gradients)} == {dtype}
        pairs = [(out.detach(), held(expected.detach())), *zip(gradients, map(held, expected_gradients), strict=True)]
        result[kind] = [_distance(got.double(), exact, dtype) for got, exact in pairs]
    return result


def _distance(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return float((got - exact).abs().max())
    return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt()) * 2**8 / 0.42


def test_every_exchange_is_whole_attention_and_its_gradient() -> None:
    for *exact, in_bf16 in run_ranks(4, _chunks_and_attention):
        for result in (*exact, in_bf16):
            assert result.pop("chunks")
            assert len(result) == 5
        for result in exact:
            assert max(itertools.chain.from_iterable(result.values())) < 1e-12, result
        # Up to four blocks are rounded, with their probabilities, and then once what they are put together to.
        for out, *gradients in in_bf16.values():
            assert out < 4**0.5
            assert max(gradients) < 12**0.5


@pytest.mark.parametrize(
    # Replicated is slow: the distributed optimizer divides the state, and writes the same tensors.
    "rest",
    [pytest.param([], id="replicated", marks=pytest.mark.slow), ["--use-distributed-optimizer"]],
)
def test_checkpoints_are_those_of_one_process(rest: list[str], tmp_path: Path) -> None:
    small = [*FLAGS, "--num-layers", "2", "--global-batch-size", "4"]
    folders = [str(tmp_path / name) for name in ("divided", "one", "back")]
    divided = [*small, *CP2, "all_gather", *rest]
    run_ranks(4, resave, divided, None, folders[0], 0)
    run_ranks(1, resave, small, folders[0], folders[1], 0)
    run_ranks(4, resave, divided, folders[1], folders[2], 0)
    first, *others = map(tensors_of, folders)
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in first)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key].view(torch.uint8), first[key].view(torch.uint8)) for key in first)
