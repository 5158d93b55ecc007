"""Every piece of a layer in every way of computing it: as the reference has it, or refused with a fix that works.

Attention by itself is held against one mask in fp64, a whole model against the same without recomputation and FP8.
"""

import itertools
from typing import Any

import pytest
import torch

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parts.attention.describe import Attention
from megatron_ext.parts.stack import layers
from megatron_ext.parts.ways import RECOMPUTATIONS, every_way, lacks
from megatron_ext.rules.part_rules import RULES

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
    "FlashAttention 3": (1, "--device cuda --flash-attention-version 3"),
    "prefill": (1, ""),
    "one token": (1, ""),
}
NOT_HERE = ("Transformer Engine", "FlashAttention 3")
_BY_LAYER = (
    "--window-size 12,0 --window-attn-skip-freq 2 --num-query-groups-local 2 --softmax-type-local learnable "
    "--value-channels 12 --value-multiplier 0.6"
)
_LATENT = (
    "--group-query-attention=false --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6"
)
PIECES = {
    "plain": "--attention-dropout 0",
    "window": "--window-size 12,0 --attention-dropout 0",
    "window of one": "--window-size 0,0 --attention-dropout 0",
    "window beyond the sequence": "--window-size 500,0 --attention-dropout 0",
    "learned sinks": "--softmax-type learnable --attention-dropout 0",
    "a sink": "--softmax-type off-by-one --attention-dropout 0",
    "caps": "--attention-logit-softcapping 0.5 --attention-dropout 0",
    "slopes": "--position-embedding-type alibi --attention-dropout 0",
    "window, learned sinks, caps and slopes": (
        "--window-size 12,0 --softmax-type learnable --attention-logit-softcapping 0.5 --position-embedding-type alibi "
        "--attention-dropout 0"
    ),
    "learned sinks, caps and slopes": (
        "--softmax-type learnable --attention-logit-softcapping 0.5 --position-embedding-type alibi "
        "--attention-dropout 0"
    ),
    "output gates": "--attention-output-gate --attention-dropout 0",
    "clips": "--qkv-clip 0.5 --attention-dropout 0",
    "sinks, dropout": "--softmax-type learnable --attention-dropout 0.25",
    "caps, dropout": "--attention-logit-softcapping 0.5 --attention-dropout 0.25",
    "slopes, dropout": "--position-embedding-type alibi --attention-dropout 0.25",
    "slopes, dropout of none": "--position-embedding-type alibi --attention-dropout 1e-13",
    "dropout": "--attention-dropout 0.25",
    "window, dropout": "--window-size 12,0 --attention-dropout 0.25",
    "heads by layer": f"{_BY_LAYER} --attention-dropout 0",
    "values of another size, dropout": "--value-channels 12 --value-multiplier 0.6 --attention-dropout 0.25",
    "latent": f"{_LATENT} --attention-dropout 0",
    "latent, window": f"{_LATENT} --window-size 12,0 --attention-dropout 0",
    "latent, dropout": f"{_LATENT} --attention-dropout 0.25",
}
_INDEXED = (
    f"{_LATENT} --q-lora-rank 12 --experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 6 --dsa-indexer-topk 9"
)
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_LLAMA = f"{_NO_DROPOUT} --swiglu --normalization RMSNorm --disable-bias-linear"
PARTS = {
    "biases": _NO_DROPOUT,
    "gates": _LLAMA,
    "norms of heads": f"{_LLAMA} --qk-layernorm",
    "norms of each head": f"{_LLAMA} --qk-layernorm --qk-layernorm-over each-head",
    "norms after": f"{_LLAMA} --norm-position after --qk-layernorm --qk-layernorm-over projection",
    "in parallel, one norm": f"{_LLAMA} --parallel-residual one-norm",
    "in parallel, two norms": f"{_NO_DROPOUT} --parallel-residual two-norms --lm-head-bias",
    "latents in parallel": f"{_LLAMA} {_LATENT} --parallel-residual one-norm",
    "windows": f"{_LLAMA} --window-size 12,0 --window-attn-skip-freq 2",
    "rotation by layer, stretched": (
        f"{_LLAMA} --window-size 12,0 --window-attn-skip-freq 2 --rotary-base-local 100 --rope-type yarn "
        "--rotary-scaling-factor 4 --original-max-position-embeddings 16"
    ),
    "heads and windows by layer": f"{_LLAMA} {_BY_LAYER}",
    "temperature": f"{_LLAMA} --no-rope-freq 2 --attention-temperature-scale 0.5 --attention-temperature-step 5",
    "latents": f"{_LLAMA} {_LATENT}",
    "chosen keys": f"{_LLAMA} {_INDEXED}",
    "delta rules": (
        f"{_LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
        "--linear-num-value-heads 4"
    ),
    "Kimi delta rules": (
        f"{_LLAMA} --experimental-attention-variant kda --linear-attention-freq 2 --linear-num-key-heads 2 "
        "--linear-num-value-heads 4"
    ),
    "short convolutions": f"{_LLAMA} --full-attn-idxs 1 --conv-bias",
    "letters": f"{_LLAMA} --hybrid-layer-pattern MG+-|M --mamba-num-groups 2 {_LATENT}",
    "selective scans": f"{_LLAMA} --hybrid-layer-pattern S-S* --scan-norm with-weights --scan-bias",
    "side by side": (
        f"{_LLAMA} --hybrid-layer-pattern B-B- --mamba-num-groups 2 --mamba-norm none --mamba-multipliers 0.5 1 2 1 2 "
        "--mixer-multipliers 0.6 1.3 --mlp-multipliers 0.7 1.2 --position-embedding-type rope"
    ),
    "sinks, bounds, output gates and clips": (
        f"{_LLAMA} --softmax-type learnable --attention-logit-softcapping 2 --final-logit-softcapping 5 --qkv-clip 0.5 "
        "--attention-output-gate"
    ),
    "gates of heads": f"{_LLAMA} --attention-output-gate --attention-output-gate-over head --qk-layernorm",
    "slopes and a sink": f"{_NO_DROPOUT} --position-embedding-type alibi --softmax-type off-by-one",
    "tokens ahead": f"{_LLAMA} --mtp-num-layers 2",
    "tokens ahead, norms after": f"{_NO_DROPOUT} --norm-position both --mtp-num-layers 1",
    "experts": f"{_LLAMA} --num-experts 4",
    "experts with biases and a capacity": (
        f"{_NO_DROPOUT} --quick-geglu --activation-func-clamp-value 2 --glu-linear-offset 1 --num-experts 4 "
        "--moe-expert-capacity-factor 0.8 --moe-router-pre-softmax"
    ),
    "shared experts": f"{_LLAMA} --num-experts 4 --moe-shared-expert-intermediate-size 32",
}
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
WAYS_OF_A_MODEL = {
    "core_attn anew": "--recompute-granularity selective",
    "mlp anew": f"{_SELECTIVE} mlp",
    "layernorm anew": f"{_SELECTIVE} layernorm",
    "all anew": f"{_SELECTIVE} core_attn mlp layernorm",
    "layers anew": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "FP8": "--fp8-format hybrid",
    "Transformer Engine": "--transformer-impl transformer_engine",
}


def _line(way: str, piece: str) -> tuple[int, list[str]]:
    """The number of ranks, and the command line."""
    ranks, flags = FLAGS[way] if piece in PIECES else (1, WAYS_OF_A_MODEL.get(way, ""))
    return ranks, [*MODEL, *flags.split(), *(PIECES | PARTS)[piece].split()]


def _config(way: str, piece: str) -> Any:
    ranks, words = _line(way, piece)
    return resolve({**parse(words).values, "world_size": ranks}, Facts())


def _problems(config: Any) -> list[str]:
    return [problem for rule in RULES for problem in rule(config, Facts())]


def _refused(way: str, piece: str) -> list[str]:
    return _problems(_config(way, piece))


def _reference(
    heads: list[torch.Tensor], attention: Attention, sink: torch.Tensor, ends: list[int], scale: float
) -> torch.Tensor:
    (query, key, value), window, softmax = heads, attention.window, attention.softmax
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    document = torch.bucketize(position, torch.tensor(ends), right=True)
    seen = (distance >= 0) & (document[:, None] == document)
    if window is not None:
        seen &= distance < window
    key, value = (tensor.repeat_interleave(query.size(1) // key.size(1), 1) for tensor in (key, value))
    scores = query @ key.mT * scale
    if softmax.cap is not None:
        scores = softmax.cap * (scores / softmax.cap).tanh()
    if softmax.has_slopes:
        slopes = torch.tensor([2.0 ** -(head + 1) for head in range(8)], dtype=torch.float64)
        scores = scores - slopes[:, None, None] * distance
    scores = scores.masked_fill(~seen, -torch.inf)
    if softmax.sink != "vanilla":
        of_sink = sink if softmax.sink == "learnable" else torch.zeros_like(sink)
        scores = torch.cat((scores, of_sink[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., :LENGTH] @ value


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
    queries, groups, size, of_value = (
        *(described.query_heads, described.groups),
        *(described.head_size, described.value_head_size),
    )
    each = (queries, size), (groups, size), (groups, of_value), (queries, of_value)
    shapes = [*((2, number, LENGTH, channels) for number, channels in each), (queries,)]
    *heads, weight, sink = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for tensor in (*heads, sink):
        tensor.requires_grad_()
    tokens = torch.ones(2, LENGTH, dtype=torch.long)
    documents, ends = None, [LENGTH]
    size, rank = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if FLAGS[way][0] > 1 else (1, 0)
    if config.data.reset_attention_mask:
        tokens[:, [20, 45]] = 0
        documents, ends = documents_of(tokens, 0, rank, size), [21, 46]
    expected = _reference(heads, described, sink, ends, 0.3)
    groups = ProcessGroupCollection()
    groups.cp = torch.distributed.group.WORLD  # pyright: ignore[reportAttributeAccessIssue]
    groups.tp = torch.distributed.new_subgroups(1)[0]
    attend = SDPAttention(
        transformer_config(config, "cpu"),
        1,
        AttnMaskType.causal,
        "self",
        config.layout.cp_comm_type[0],
        0.3,
        groups,
        window=described.window,
        softmax=described.softmax,
    )
    learned = dict(attend.named_parameters())
    if learned:
        attend.softmax_offset = torch.nn.Parameter(sink.detach())
    if way in ("prefill", "one token"):
        with torch.no_grad():
            cache: Any = KeyValueCache(LENGTH, [LENGTH - 1] * 2, LENGTH - 1, torch.device("cpu"))
            first = cache.attend(
                1, *(tensor[:, :, :-1] for tensor in heads), scale=0.3, window=described.window, scores=attend.scores
            )
            cache.advance()
            last = cache.attend(
                1, *(tensor[:, :, -1:] for tensor in heads), scale=0.3, window=described.window, scores=attend.scores
            )
            found = first if way == "prefill" else last
            part = expected[:, :, :-1] if way == "prefill" else expected[:, :, -1:]
            return float((found - part.permute(2, 0, 1, 3).flatten(2)).abs().max())

    def held(whole: torch.Tensor) -> torch.Tensor:
        return whole if size == 1 else context_parallel._in_chunks(whole, size)[rank]

    found = attend(*(held(tensor) for tensor in heads), documents=documents)
    part = held(expected).permute(2, 0, 1, 3).flatten(2)
    of_part = held(weight).permute(2, 0, 1, 3).flatten(2)
    of_found = torch.autograd.grad((found * of_part).sum(), [*heads, *attend.parameters()])
    if size > 1:
        for gradient in of_found:
            torch.distributed.all_reduce(gradient)
    of_expected = torch.autograd.grad((expected * weight).sum(), [*heads, *([sink] if learned else [])])
    pairs = [(found, part), *zip(of_found, of_expected, strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


def _differences(pairs: list[tuple[str, str]]) -> list[float]:
    from megatron.core import tensor_parallel

    from megatron_ext import device

    device.install("cpu")
    torch.distributed.init_process_group("gloo")
    tensor_parallel.get_cuda_rng_tracker().add("model-parallel-rng", 1)  # pyright: ignore[reportOptionalMemberAccess]
    return [_difference(*pair) for pair in pairs]


PAIRS = [*itertools.product(FLAGS, PIECES), *itertools.product(WAYS_OF_A_MODEL, PARTS)]
COMPUTED = [
    pair for pair in PAIRS if pair[0] not in NOT_HERE and not _refused(*pair) and not pair[1].endswith("dropout")
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_refused_is_what_one_mask_gives(ranks: int) -> None:
    pairs = [pair for pair in COMPUTED if pair[1] in PIECES and FLAGS[pair[0]][0] == ranks]
    assert len(pairs) > 4
    for of_rank in run_ranks(ranks, _differences, pairs):
        assert dict(zip(pairs, of_rank, strict=True)) == pytest.approx(dict.fromkeys(pairs, 0.0), abs=1e-11)


def _of_models(pairs: list[tuple[str, str]]) -> list[float]:
    """The largest difference of loss and gradients from those of the plain way, by the norm of the latter."""
    from megatron_ext import device
    from tests.support.several_models import end_layout
    from tests.support.small_models import build_small_model

    device.install("cpu")
    tokens = torch.randint(64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def computed(way: str, part: str) -> list[torch.Tensor]:
        [model], _ = build_small_model(_config(way, part))
        positions = torch.arange(LENGTH).expand(2, -1)
        loss = model(tokens[:, :-1].contiguous(), positions, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        end_layout()
        return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    plain = {part: computed("", part) for part in PARTS}
    return [
        max(
            float((one - other).norm() / other.norm().clamp(min=1e-12))
            for one, other in zip(computed(way, part), plain[part], strict=True)
        )
        for way, part in pairs
    ]


@pytest.mark.full
def test_models_are_what_they_are_in_the_plain_way() -> None:
    """To the bit where something is computed again; FP8 has 3 bits of a number, and 2 of a gradient."""
    pairs = [pair for pair in COMPUTED if pair[1] in PARTS]
    assert len({way for way, _ in pairs}) == len(WAYS_OF_A_MODEL) - 1
    [found] = run_ranks(1, _of_models, pairs)
    for (way, part), difference in zip(pairs, found, strict=True):
        assert (0.0 < difference < 0.3) if way == "FP8" else difference == 0.0, (way, part, difference)


@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
def test_what_is_refused_has_a_fix_that_works(pair: tuple[str, str]) -> None:
    ranks, words = _line(*pair)
    for sentence in _refused(*pair):
        assert not sentence.endswith("; use ")
        for fix in sentence.partition("; ")[2].removeprefix("use ").split(", or "):
            if fix.startswith("leave "):
                left_out = words.index(fix.split()[1])
                typed = [*words[:left_out], *words[left_out + 2 :]]
            else:
                typed = [*words, *fix.removeprefix("use ").split()]
            assert sentence not in _problems(resolve({**parse(typed).values, "world_size": ranks}, Facts()))


def test_pieces_are_refused_where_a_way_lacks_them() -> None:
    assert ["--attention-dropout 0" in one for one in _refused("documents", "dropout")] == [True]
    assert _refused("ring", "window") == [
        "--cp-comm-type p2p sends all keys around the ring, and no rank leaves out those that a window hides, but "
        "--window-size is 12,0; use --window-size -1,0, or --cp-comm-type all_gather"
    ]
    assert _refused("FlashAttention 3", "dropout") == [
        "--flash-attention-version 3 takes FlashAttention 3, whose kernels have no dropout, but "
        "--attention-dropout is 0.25; use --attention-dropout 0, or --flash-attention-version 2"
    ]
    assert len(_refused("Transformer Engine", "window")) == 1
    assert len(_refused("Transformer Engine", "norms after")) == 2
    configs = [_config(*pair) for pair in PAIRS]
    asked = {piece: by for config in configs for layer in layers(config) for piece, by in layer.pieces(config).items()}
    ways = {**every_way(), **RECOMPUTATIONS}
    assert {piece for way in ways.values() for piece in way.lacks} <= asked.keys(), "a piece that no test has"
    for piece, by in asked.items():
        lacking = [name for name, way in ways.items() if lacks(name, way, piece, by)]
        assert lacking, f"every way has {piece}"
        assert by.lacked_by.keys() <= {*lacking}, f"{piece} names no way"
