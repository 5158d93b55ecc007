"""DeepSeek sparse attention against its formulas written out (arXiv:2512.02556, equations 1 to 4), in fp64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.data.packing import documents_of
from megatron_ext.parallel import groups
from megatron_ext.parts.attention.cached import Sequences, TextsInARow
from megatron_ext.parts.numbers import RecordedNumbers
from megatron_ext.plugins.latent_attention import indexer
from megatron_ext.plugins.latent_attention.describe import INDEXER_LOSS
from tests.support.generated_texts import PROMPTS, going_on
from tests.support.indexed_attention import written_out
from tests.support.small_models import INDEXED, build_small_model, small_config

LENGTH, BATCH = 16, 2
EOD = 7


@pytest.fixture
def attention(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The attention of a layer, and the table of angles for any positions."""
    sizes = {**INDEXED, **getattr(request, "param", {})}
    [gpt], _ = build_small_model(small_config(sizes))
    layer: Any = gpt.decoder.layers[0].self_attention.double()
    rotary: Any = getattr(gpt, "rotary_pos_emb", None)
    torch.manual_seed(0)
    rotates = sizes["position_embedding_type"] != "none"
    yield layer, lambda positions: rotary.at(positions).double() if rotates else None
    groups.destroy()


@pytest.mark.parametrize("numbers", [1 << 24, 1], ids=["one block", "a query a block"])
@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"dsa_indexer_use_sparse_loss": True, "dsa_indexer_loss_coeff": 0.3},
        {"dsa_indexer_warmup": True, "dsa_indexer_use_sparse_loss": True},
        {"dsa_indexer_rope_interleaved": True, "dsa_indexer_n_heads": 8, "dsa_indexer_topk": 3, "v_head_dim": 9},
        {"position_embedding_type": "none"},
    ],
    ids=str,
    indirect=True,
)
@pytest.mark.parametrize("packed", [False, True])
def test_output_loss_and_gradients(attention: Any, numbers: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_BLOCK_NUMBERS", numbers)
    layer, table_of = attention
    hidden = torch.randn(LENGTH, BATCH, 64, dtype=torch.float64, requires_grad=True)
    table, tokens = table_of(torch.arange(LENGTH)[None]), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    tokens[0, 5], tokens[1, 2], tokens[1, 11] = [EOD] * 3
    number = (tokens == EOD).long().cumsum(1).roll(1, 1) * (torch.arange(LENGTH) > 0)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    sequences = Sequences(documents_of(tokens, EOD)) if packed else None
    if packed:
        visible = visible & (number[:, :, None] == number[:, None])
    expected, loss = written_out(layer, hidden, table, visible)
    recorded = RecordedNumbers({INDEXER_LOSS: 1}, 1, hidden.device)
    with recorded.recording():
        found = layer(hidden, None, table, sequences)[0]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    assert recorded.sums().item() == pytest.approx(
        float(loss.detach()) / layer.described.indexer.loss / (BATCH * LENGTH)
    )
    names, weights = zip(*layer.named_parameters(), strict=True)
    pull = torch.randn_like(found)
    wanted = torch.autograd.grad((expected * pull).sum() + loss, (hidden, *weights))
    got = torch.autograd.grad((found * pull).sum(), (hidden, *weights))
    for name, one, other in zip(("hidden", *names), got, wanted, strict=True):
        assert other.abs().max() > 1e-9, name
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("attention", [{}, {"dsa_indexer_use_sparse_loss": True}], ids=str, indirect=True)
def test_its_loss_trains_the_indexer_and_nothing_else(attention: Any) -> None:
    """The weight of the loss changes the gradients of the indexer alone; no other loss changes these."""
    layer, table_of = attention
    hidden = torch.randn(LENGTH, BATCH, 64, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def gradients(weight: float, pull: float) -> dict[str, torch.Tensor]:
        layer.core_attention.described = replace(layer.core_attention.described, loss=weight)
        output = layer(hidden, None, table_of(torch.arange(LENGTH)[None]))[0]
        found = torch.autograd.grad(pull * output.square().sum(), (hidden, *weights))
        return dict(zip(("hidden", *names), found, strict=True))

    once, twice, pulled = gradients(1.0, 1.0), gradients(2.0, 1.0), gradients(1.0, 3.0)
    of_indexer = {name for name in once if ".indexer." in name}
    assert len(of_indexer) == 5
    for name, gradient in once.items():
        assert gradient.abs().max() > 1e-9, name
        by_loss, by_output = (2.0, 1.0) if name in of_indexer else (1.0, 3.0)
        torch.testing.assert_close(twice[name], by_loss * gradient, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(pulled[name], by_output * gradient, atol=1e-12, rtol=1e-12)


def test_of_equal_scores_the_earlier_key_is_chosen() -> None:
    scores = torch.tensor([[[0.0, 2.0, 0.0, 2.0, 0.0, -torch.inf]]])
    assert indexer.best(scores, 4).tolist() == [[[1, 3, 0, 2]]]


def test_generation_chooses_what_training_does(attention: Any) -> None:
    """One token after the other; and the prompts in one row."""
    layer, table_of = attention
    *_, cache = going_on(lambda x, positions, cache: layer(x, None, table_of(positions), cache)[0])
    assert cache._kept
    texts = [torch.randn(length, 1, 64, dtype=torch.float64) for length in PROMPTS]
    with torch.no_grad():
        wanted = [layer(text, None, table_of(torch.arange(len(text))[None]))[0] for text in texts]
        table = table_of(torch.cat([torch.arange(length) for length in PROMPTS])[None])
        found = layer(torch.cat(texts), None, table, TextsInARow(list(PROMPTS), 0, torch.device("cpu")))[0]
        torch.testing.assert_close(found, torch.cat(wanted), atol=1e-10, rtol=1e-10)
