"""Every piece of attention in every way of computing it: as one mask in fp64 has it, or refused with a working fix."""

import itertools
from typing import Any

import pytest
import torch

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.parts.attention.ways import WAYS
from megatron_ext.parts.stack import layers
from megatron_ext.rules.part_rules import parts_are_computed
from megatron_ext.verify.ranks import run_ranks

LENGTH = 64
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    f"--seq-length {LENGTH} --position-embedding-type rope --micro-batch-size 2 --global-batch-size 2 --device cpu "
    "--vocab-size 64 --mock-data --train-iters 1 --lr 1e-3"
).split()
# Flags of each way, and the ranks that it takes.
FLAGS: dict[str, tuple[int, str]] = {
    "whole": (1, ""),
    "documents": (1, "--reset-attention-mask"),
    "all_gather": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "ring": (2, "--context-parallel-size 2 --cp-comm-type p2p"),
    "all to all": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "documents, all_gather": (2, "--reset-attention-mask --context-parallel-size 2 --cp-comm-type all_gather"),
    "Transformer Engine": (1, "--transformer-impl transformer_engine"),
    "prefill": (1, ""),
    "one token": (1, ""),
}
PIECES = {
    "plain": "--attention-dropout 0",
    "window": "--window-size 12,0 --attention-dropout 0",
    "window of one": "--window-size 0,0 --attention-dropout 0",
    "window beyond the sequence": "--window-size 500,0 --attention-dropout 0",
    "dropout": "--attention-dropout 0.25",
    "window, dropout": "--window-size 12,0 --attention-dropout 0.25",
}


def _config(way: str, piece: str) -> Any:
    ranks, flags = FLAGS[way]
    values = parse([*MODEL, *flags.split(), *PIECES[piece].split()]).values
    return resolve({**values, "world_size": ranks}, Facts())


def _refused(way: str, piece: str) -> list[str]:
    return list(parts_are_computed(_config(way, piece), Facts()))


def _reference(heads: list[torch.Tensor], window: int | None, ends: list[int], scale: float) -> torch.Tensor:
    query, key, value = heads
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    document = torch.bucketize(position, torch.tensor(ends), right=True)
    seen = (distance >= 0) & (document[:, None] == document)
    if window is not None:
        seen &= distance < window
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    return (query @ key.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ value


def _difference(way: str, piece: str) -> float:
    """The largest difference of the result and of the gradients, on this rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_ext.data.packing import documents_of
    from megatron_ext.model.config import transformer_config
    from megatron_ext.parts.attention import context_parallel
    from megatron_ext.parts.attention.cached import KeyValueCache
    from megatron_ext.parts.attention.compute import SDPAttention

    config = _config(way, piece)
    described = layers(config)[0].attention
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 8, LENGTH, 8), (2, 4, LENGTH, 8), (2, 4, LENGTH, 8), (2, 8, LENGTH, 8)
    *heads, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for tensor in heads:
        tensor.requires_grad_()
    tokens = torch.ones(2, LENGTH, dtype=torch.long)
    documents, ends = None, [LENGTH]
    size, rank = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if FLAGS[way][0] > 1 else (1, 0)
    if config.data.reset_attention_mask:
        tokens[:, [20, 45]] = 0
        documents, ends = documents_of(tokens, 0, rank, size), [21, 46]
    expected = _reference(heads, described.window, ends, 0.3)
    if way in ("prefill", "one token"):
        with torch.no_grad():
            cache: Any = KeyValueCache(LENGTH, [LENGTH - 1] * 2, LENGTH - 1, torch.device("cpu"))
            first = cache.attend(1, *(tensor[:, :, :-1] for tensor in heads), scale=0.3, window=described.window)
            cache.advance()
            last = cache.attend(1, *(tensor[:, :, -1:] for tensor in heads), scale=0.3, window=described.window)
            found = first if way == "prefill" else last
            part = expected[:, :, :-1] if way == "prefill" else expected[:, :, -1:]
            return float((found - part.permute(2, 0, 1, 3).flatten(2)).abs().max())
    groups = ProcessGroupCollection()
    groups.cp = torch.distributed.group.WORLD  # pyright: ignore[reportAttributeAccessIssue]
    attend = SDPAttention(
        transformer_config(config, "cpu"),
        1,
        AttnMaskType.causal,
        "self",
        config.layout.cp_comm_type[0],
        0.3,
        groups,
        window=described.window,
    )

    def held(whole: torch.Tensor) -> torch.Tensor:
        return whole if size == 1 else context_parallel._in_chunks(whole, size)[rank]

    found = attend(*(held(tensor) for tensor in heads), documents=documents)
    part = held(expected).permute(2, 0, 1, 3).flatten(2)
    of_part = held(weight).permute(2, 0, 1, 3).flatten(2)
    of_found = torch.autograd.grad((found * of_part).sum(), heads)
    if size > 1:
        for gradient in of_found:
            torch.distributed.all_reduce(gradient)
    of_expected = torch.autograd.grad((expected * weight).sum(), heads)
    pairs = [(found, part), *zip(of_found, of_expected, strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


def _differences(pairs: list[tuple[str, str]]) -> list[float]:
    torch.distributed.init_process_group("gloo")
    return [_difference(*pair) for pair in pairs]


COMPUTED = [
    pair for pair in itertools.product(FLAGS, PIECES) if not _refused(*pair) and not pair[1].endswith("dropout")
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_refused_is_what_one_mask_gives(ranks: int) -> None:
    pairs = [pair for pair in COMPUTED if FLAGS[pair[0]][0] == ranks and pair[0] != "Transformer Engine"]
    assert len(pairs) > 4
    for of_rank in run_ranks(ranks, _differences, pairs):
        assert dict(zip(pairs, of_rank, strict=True)) == pytest.approx(dict.fromkeys(pairs, 0.0), abs=1e-11)


@pytest.mark.parametrize("pair", itertools.product(FLAGS, PIECES), ids=", ".join)
def test_what_is_refused_has_a_fix_that_works(pair: tuple[str, str]) -> None:
    way, piece = pair
    for sentence in _refused(way, piece):
        for fix in sentence.partition("; use ")[2].split(", or "):
            ranks, flags = FLAGS[way]
            typed = parse([*MODEL, *flags.split(), *PIECES[piece].split(), *fix.split()]).values
            left = list(parts_are_computed(resolve({**typed, "world_size": ranks}, Facts()), Facts()))
            assert sentence not in left


def test_pieces_are_refused_where_a_way_lacks_them() -> None:
    assert ["--attention-dropout 0" in one for one in _refused("documents", "dropout")] == [True]
    assert _refused("ring", "window") == [
        "--cp-comm-type p2p sends all keys around the ring, and no rank leaves out those that a window hides, but "
        "--window-size is 12,0; use --window-size -1,0, or --cp-comm-type all_gather"
    ]
    assert len(_refused("Transformer Engine", "window")) == 1
    assert all(way.lacks.keys() <= {"dropout", "window"} for way in WAYS.values()), "a piece that no test has"
