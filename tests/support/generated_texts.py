"""Layers go on from prompts of different lengths, one token after the other, and with texts one after another."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ext.data.packing import documents_of
from megatron_ext.parallel import groups
from megatron_ext.parts.attention.cached import KeyValueCache, Sequences, TextsInARow
from tests.support.small_models import build_small_model, small_config

PROMPTS, FILLED, MORE = (9, 6, 1), 9, 4
TOLERANCE: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}
HERE = torch.device("cpu")


def going_on(layer: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]) -> Iterator[KeyValueCache]:
    """Yield the cache after each token that follows prompts of different lengths, side by side; every token must be as
    at its place in the whole text.

    Args:
        layer: what a layer makes of states [S, B, 64] in fp64 at positions [B, S], with a cache or None.
    """
    texts = [torch.randn(length + MORE, 1, 64, dtype=torch.float64) for length in PROMPTS]
    with torch.no_grad():
        expected = [layer(text, torch.arange(len(text))[None], None) for text in texts]
        cache = KeyValueCache(FILLED + MORE, list(PROMPTS), FILLED, HERE)
        prompts = torch.randn(FILLED, len(texts), 64, dtype=torch.float64)
        for row, (text, length) in enumerate(zip(texts, PROMPTS, strict=True)):
            prompts[:length, row] = text[:length, 0]
        first = layer(prompts, torch.arange(FILLED)[None], cache)
        for row, length in enumerate(PROMPTS):
            torch.testing.assert_close(first[:length, row], expected[row][:length, 0], **TOLERANCE)
        for step in range(MORE):
            positions = cache.advance()
            tokens = torch.stack([text[length + step] for text, length in zip(texts, PROMPTS, strict=True)], dim=1)
            wanted = torch.stack([whole[length + step] for whole, length in zip(expected, PROMPTS, strict=True)], dim=1)
            torch.testing.assert_close(layer(tokens, positions, cache), wanted, **TOLERANCE)
            yield cache


def recurrent_layer(model: dict[str, Any]) -> Any:
    """Return the mixer of the first layer of a small model, with weights that are no initial ones."""
    [gpt], _ = build_small_model(small_config(model))
    layer: Any = gpt.decoder.layers[0].self_attention
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    groups.destroy()
    return layer


def assert_documents_are_as_each_by_itself(layer: Any) -> None:
    """Compare documents in a sample, next to a sample of one document, and texts in a row, with each document alone;
    some are shorter than a convolution, and some begin or end a span of 40 positions."""
    lengths = [3, 37, 1, 2, 80, 27]
    x = torch.randn(sum(lengths), 2, 64, dtype=torch.float64)
    begins = torch.zeros(2, len(x), dtype=torch.bool)
    begins[0, [sum(lengths[:number]) for number in range(len(lengths))]] = True
    documents = documents_of(torch.ones(2, len(x), dtype=torch.int64), 0, begins_BS=begins)
    found = layer(x, packed_seq_params=Sequences(documents))[0]
    apart = torch.cat([layer(part)[0] for part in x[:, :1].split(lengths)])
    torch.testing.assert_close(found[:, :1], apart, **TOLERANCE)
    torch.testing.assert_close(found[:, 1:], layer(x[:, 1:])[0], **TOLERANCE)
    in_a_row = layer(x[:, :1], packed_seq_params=TextsInARow(lengths[:-1], lengths[-1], HERE))[0]
    torch.testing.assert_close(in_a_row, apart, **TOLERANCE)
