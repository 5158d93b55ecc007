"""A pass without training, whole or with keys and values kept, computes what the training's forward pass does."""

from typing import Any

import pytest
import torch

from megatron_ext.model.gpt import GPT
from megatron_ext.parts.attention.cached import KeyValueCache, TextsInARow, WholeSequences
from tests.support.small_models import LLAMA, OLMO2, build_small_model, small_config

MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": LLAMA,
    "OLMo 2": OLMO2,
    "pairs of neighbouring channels, half of them rotated": {
        **LLAMA,
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
    },
    "pairs of neighbouring channels, all of them": {**LLAMA, "rotary_interleaved": True},
    "Mixtral": {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32},
}
ROWS, LENGTH = 3, 12
PROMPTS = [4, 9, 1]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> GPT:
    chunks, _ = build_small_model(small_config(MODELS[request.param]))
    return chunks[0].eval().requires_grad_(False)


def _tokens() -> torch.Tensor:
    return torch.randint(250, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def _expected(model: GPT, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Return the logits of a training's pass, [B, S, V]."""
    with torch.no_grad():
        return model(tokens_BS, torch.arange(LENGTH)[None])[..., :250]


def test_whole_sequences(model: GPT) -> None:
    tokens = _tokens()
    expected = _expected(model, tokens)
    wanted = torch.tensor([11 * ROWS + 2, 0, 4 * ROWS + 1, 4 * ROWS + 1, 11 * ROWS])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = model(tokens, torch.arange(LENGTH)[None], inference=WholeSequences(wanted))[:, :250]
        torch.testing.assert_close(found, expected[wanted % ROWS, wanted // ROWS], rtol=1e-5, atol=1e-5)


def test_texts_one_after_another(model: GPT) -> None:
    tokens, filled = _tokens(), 2
    expected = _expected(model, tokens)[torch.arange(ROWS), torch.tensor(PROMPTS) - 1]
    texts = torch.cat([*(tokens[row, :length] for row, length in enumerate(PROMPTS)), tokens[0, :filled]])
    positions = torch.cat([torch.arange(length) for length in (*PROMPTS, filled)])
    for count in (0, filled):
        here = slice(len(texts) - filled + count)
        with torch.inference_mode():
            inference = TextsInARow(PROMPTS, count, torch.device("cpu"))
            found = model(texts[None, here], positions[None, here], inference=inference)[:, :250]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_keys_and_values_kept_of_unequal_prompts(model: GPT) -> None:
    """The longest prompt of all replicas, whose width the rows have, may be another's; here all may be of one
    length."""
    tokens = _tokens()
    expected, rows = _expected(model, tokens), torch.arange(ROWS)
    steps = LENGTH - max(PROMPTS)
    for lengths, width in ((PROMPTS, 9), (PROMPTS, 11), ([9] * ROWS, 9), ([9] * ROWS, 10)):
        prompts = torch.zeros(ROWS, width, dtype=torch.int64)
        for row, length in enumerate(lengths):
            prompts[row, :length] = tokens[row, :length]
        with torch.inference_mode():
            cache = KeyValueCache(width + steps, lengths, width, torch.device("cpu"))
            found = [model(prompts, torch.arange(width)[None], inference=cache)]
            for _ in range(steps):
                places = cache.advance()
                found.append(model(tokens.gather(1, places), places, inference=cache))
        for step, logits in enumerate(found):
            last = torch.tensor(lengths) + step - 1
            torch.testing.assert_close(logits[:, :250], expected[rows, last], rtol=1e-5, atol=1e-5)


def test_memory_is_bounded(model: GPT) -> None:
    with torch.inference_mode():
        cache = KeyValueCache(LENGTH, [LENGTH] * ROWS, LENGTH, torch.device("cpu"))
        model(_tokens(), torch.arange(LENGTH)[None], inference=cache)
        with pytest.raises(AssertionError, match="fewer positions"):
            cache.advance()


def test_the_prompts_pass_scales_scores_as_it_is_told() -> None:
    """With half of the usual scale the scores are those of half of the query."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 2, 3, 4, generator=generator) for _ in range(3))
    cache = KeyValueCache(3, [3, 3], 3, torch.device("cpu"))
    usual = WholeSequences(torch.tensor([0])).attend(1, query / 2, key, value, scale=0.5)
    assert torch.equal(cache.attend(1, query, key, value, scale=0.25), usual)
