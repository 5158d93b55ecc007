"""What a layer computes in which order, on numbers in the place of tensors: norms, branches, dropout, and what is
computed again in the backward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.parts import layer
from megatron_ext.parts.attention import compute as attention
from megatron_ext.parts.attention.compute import CausalSelfAttention, SDPAttention
from megatron_ext.parts.layer import PostNormLayer, PreNormLayer


def _layer(
    kind: type[PreNormLayer], monkeypatch: pytest.MonkeyPatch, *, training: bool = True, again: bool = False
) -> tuple[Any, list[Any]]:
    """A layer whose parts add powers of ten, and what is done: branches are added with the dropout that is told."""
    done: list[Any] = []

    def adds(training: bool, fused: bool) -> Any:
        def add(branch: tuple[Any, Any], residual: Any, dropout: float) -> Any:
            done.append(("add", dropout, training, fused))
            output, bias = branch
            return residual + output + (0 if bias is None else bias)

        return add

    def checkpoint(function: Any, distribute: bool, *given: Any) -> Any:
        done.append("again")
        return function(*given)

    monkeypatch.setattr(layer, "get_bias_dropout_add", adds)
    monkeypatch.setattr(layer, "tensor_parallel", SimpleNamespace(checkpoint=checkpoint))
    made: Any = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.train(training)
    made.config = SimpleNamespace(bias_dropout_fusion=True)
    made.hidden_dropout, made.recompute_mlp = 0.25, again
    made.recompute_input_layernorm = made.recompute_pre_mlp_layernorm = False
    parts = {
        "input_layernorm": lambda x: x * 2,
        "pre_mlp_layernorm": lambda x: x * 3,
        "post_self_attn_layernorm": lambda x: x * 5,
        "post_mlp_layernorm": lambda x: x * 7,
        "self_attention": lambda x, mask, angles, packed: (x + 10, 100),
        "mlp": lambda x: (x + 1000, 10000),
    }
    vars(made).update(parts)
    return made, done


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_norms_before_or_after_the_branches(training: bool, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """x + attention(2 x), then x + MLP(3 x); or x + 5 attention(x), then x + 7 MLP(x). What is computed again is so in
    training alone."""
    added = [("add", 0.25, training, True)] * 2
    again_at = ["again"] if again and training else []
    x: Any = 1
    made, done = _layer(PreNormLayer, monkeypatch, training=training, again=again)
    middle = 1 + (2 + 10) + 100
    assert made.forward(x) == (middle + (3 * middle + 1000) + 10000, None)
    assert done == [added[0], *again_at, added[1]]
    made, done = _layer(PostNormLayer, monkeypatch, training=training, again=again)
    middle = 1 + 5 * (1 + 10 + 100)
    assert made.forward(x) == (middle + 7 * (middle + 1000 + 10000), None)
    assert done == [added[0], *again_at, added[1]]


@pytest.mark.parametrize("training", [True, False])
def test_attention_is_computed_again_in_training_alone(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []
    monkeypatch.setattr(
        attention,
        "tensor_parallel",
        SimpleNamespace(checkpoint=lambda function, distribute, *given: again.append(len(given)) or function(*given)),
    )
    made: Any = CausalSelfAttention.__new__(CausalSelfAttention)
    torch.nn.Module.__init__(made)
    made.train(training)
    heads = tuple(torch.randn(5, 2, 3, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    made.checkpoint_core_attention = True
    vars(made).update(
        _heads=lambda states, table: tuple(head.permute(1, 2, 0, 3) for head in heads),
        core_attention=lambda query, key, value: (query.shape, query.is_contiguous()),
        linear_proj=lambda context: context,
    )
    assert made.forward(torch.zeros(1), None) == ((2, 3, 5, 4), True)
    assert again == ([3] if training else [])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ranks_with_other_heads_draw_other_masks(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the generator of divided regions; under sequence parallelism all of the block draws from it already."""
    forked: list[bool] = []

    class _Fork:
        def __enter__(self) -> None:
            forked.append(True)

        def __exit__(self, *_: object) -> None:
            """Nothing is put back."""

    tracker = SimpleNamespace(fork=_Fork)
    monkeypatch.setattr(attention, "tensor_parallel", SimpleNamespace(get_cuda_rng_tracker=lambda: tracker))
    config: Any = SimpleNamespace(context_parallel_size=1, attention_dropout=0.5, sequence_parallel=sequence_parallel)
    core = SDPAttention(config, 1, attention.AttnMaskType.causal, "self")
    monkeypatch.setattr(core, "_whole", lambda query, key, value: value)
    heads = torch.zeros(1, 2, 3, 4)
    assert core.train().forward(heads, heads, heads).shape == (3, 1, 8)
    assert forked == ([] if sequence_parallel else [True])
    forked.clear()
    core.eval().forward(heads, heads, heads)
    core.dropout = 0.0
    core.train().forward(heads, heads, heads)
    assert forked == []


def test_a_scale_of_ones_own_is_that_of_every_way_to_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the root of the channels of a head."""
    seen: list[Any] = []
    for name in ("attend_ring", "attend_gathered"):
        monkeypatch.setattr(
            attention.context_parallel, name, lambda q, k, v, group, scale, name=name: seen.append((name, scale)) or v
        )
    monkeypatch.setattr(
        attention, "attend_documents", lambda q, k, v, documents, scale: seen.append(("documents", scale)) or v
    )
    config: Any = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0, sequence_parallel=False)
    heads = torch.zeros(1, 2, 3, 16)
    documents: Any = "documents"
    for scale, expected in ((None, 0.25), (0.125, 0.125)):
        core = SDPAttention(config, 1, attention.AttnMaskType.causal, "self", softmax_scale=scale)
        core.forward(heads, heads, heads, documents)
        core.cp_group = "group"  # pyright: ignore[reportAttributeAccessIssue]
        for kind in ("p2p", "all_gather"):
            core.cp_comm_type = kind
            core.forward(heads, heads, heads)
        names = ("documents", "attend_ring", "attend_gathered")
        assert seen == [(name, expected) for name in names]
        seen.clear()
