"""Padding of the vocabulary takes no probability and gets no gradient, on any rank."""

import pytest
import torch

from megatron_ext.model.names import global_named_parameters
from megatron_ext.verify.ranks import run_ranks
from tests.support.small_models import LLAMA, build_small_model, small_config

VOCAB_SIZE = 250


def _loss_and_gradients(config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    [gpt], _ = build_small_model(config)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = gpt(tokens[:, :-1], torch.arange(16).expand(2, 16), None, labels=tokens[:, 1:])
    losses.sum().backward()
    return losses.detach(), {name: tensor.grad for name, tensor in global_named_parameters([gpt])}  # pyright: ignore


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize(("padded", "tp"), [(256, 1), (512, 1), (512, 2), (512, 4)])
def test_loss_and_gradients_are_those_without_padding(padded: int, tp: int, untied: bool) -> None:
    """At 512 over 4 ranks, two ranks hold nothing but padding."""
    model = {**LLAMA, "untie_embeddings_and_output_weights": untied}
    exact = small_config({**model, "padded_vocab_size": VOCAB_SIZE}, vocab_size=VOCAB_SIZE)
    layout = {"tensor_model_parallel_size": tp, "world_size": tp}
    config = small_config({**model, "padded_vocab_size": padded}, layout, vocab_size=VOCAB_SIZE)
    [(expected, gradients)] = run_ranks(1, _loss_and_gradients, exact)
    results = run_ranks(tp, _loss_and_gradients, config)
    for losses, _ in results:
        torch.testing.assert_close(losses, expected, rtol=3e-7, atol=0)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight")[: 1 + untied]:
        got = torch.cat([shards[name] for _, shards in results])
        assert torch.count_nonzero(got[VOCAB_SIZE:]) == 0
        # What any two layouts promise: within 1e-5 of the gradient's norm.
        assert (got[:VOCAB_SIZE] - gradients[name]).norm() < 1e-5 * gradients[name].norm()
