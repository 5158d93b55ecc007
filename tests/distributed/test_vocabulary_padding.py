"""Padding of the vocabulary takes no probability and gets no gradient, on any rank."""

from typing import Any

import pytest
import torch

from megatron_ext.model.names import global_named_parameters
from megatron_ext.verify.ranks import run_ranks
from tests.support.several_models import in_turn
from tests.support.small_models import LLAMA, build_small_model, small_config

VOCAB_SIZE = 250
UNTIED = (False, True)


Found = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Losses, or their sum, and gradients by name."""


def _losses_and_sum(config) -> list[Found]:
    """Of the loss of each token, and of their sum in one with the output layer (--linear-cross-entropy)."""
    [gpt], _ = build_small_model(config)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(0))
    given = tokens[:, :-1], torch.arange(16).expand(2, 16), None
    found: list[Found] = []
    for mask in (None, torch.ones(2, 16)):
        losses = gpt(*given, labels=tokens[:, 1:], loss_mask=mask)
        losses.sum().backward()
        found.append((losses.detach(), {name: tensor.grad for name, tensor in global_named_parameters([gpt])}))  # pyright: ignore
        gpt.zero_grad(set_to_none=True)
    return found


def _results(padded: int, tp: int) -> list[list[list[Found]]]:
    """By rank: of a model with tied, and of one with untied embeddings."""
    layout = {"tensor_model_parallel_size": tp, "world_size": tp}
    sizes = {"num_layers": 1, "padded_vocab_size": padded}
    models = [{**LLAMA, **sizes, "untie_embeddings_and_output_weights": untied} for untied in UNTIED]
    configs = [small_config(model, layout, vocab_size=VOCAB_SIZE) for model in models]
    return run_ranks(tp, in_turn, _losses_and_sum, configs)


@pytest.fixture(scope="module")
def unpadded() -> list[list[Found]]:
    return _results(VOCAB_SIZE, tp=1)[0]


@pytest.mark.parametrize(("padded", "tp"), [(256, 1), (512, 1), (512, 2), (512, 4)])
def test_loss_and_gradients_are_those_without_padding(padded: int, tp: int, unpadded: Any) -> None:
    """At 512 over 4 ranks, two ranks hold nothing but padding."""
    by_rank = _results(padded, tp)
    for number, untied in enumerate(UNTIED):
        for way, exact in enumerate(unpadded[number]):
            _assert_equal(exact, [rank[number][way] for rank in by_rank], untied)


def _assert_equal(exact: Any, results: list[Found], untied: bool) -> None:
    expected, gradients = exact
    for losses, _ in results:
        torch.testing.assert_close(losses, expected, rtol=3e-7, atol=0)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight")[: 1 + untied]:
        got = torch.cat([shards[name] for _, shards in results])
        assert torch.count_nonzero(got[VOCAB_SIZE:]) == 0
        # What any two layouts promise: within 1e-5 of the gradient's norm.
        assert (got[:VOCAB_SIZE] - gradients[name]).norm() < 1e-5 * gradients[name].norm()
