"""What a layer computes in which order, on numbers in the place of tensors: norms, branches, dropout, and what is
computed again in the backward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.parts import layer
from megatron_ext.parts.attention import compute as attention
from megatron_ext.parts.attention.compute import SDPAttention
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
