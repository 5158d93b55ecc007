"""Depths of multi-token prediction compute the paper's equations: losses and gradients against plain torch."""

from typing import Any

import pytest
import torch

from megatron_ext.model.names import global_named_parameters
from megatron_ext.train.step import compute_gradients
from megatron_ext.train.step_allreduce import StopVotes
from megatron_ext.train.step_allreduce import named as numbers_by_name
from tests.support import next_tokens
from tests.support.small_runs import built

_FLAGS = (
    "--seq-length 24 --hidden-size 40 --num-attention-heads 4 --kv-channels 6 --group-query-attention "
    "--swiglu --normalization RMSNorm --disable-bias-linear --init-method-std 0.15 --mtp-loss-scaling-factor 0.3 "
    "--hidden-dropout 0 --attention-dropout 0"
)
_PACKED = "--reset-position-ids --reset-attention-mask"


@pytest.mark.parametrize(
    ("depths", "flags"),
    [
        (1, "--num-query-groups 2"),
        (2, "--num-query-groups 1 --untie-embeddings-and-output-weights"),
        (1, f"--num-query-groups 4 --untie-embeddings-and-output-weights {_PACKED}"),
        (2, f"--num-query-groups 2 {_PACKED} --eod-mask-loss"),
        (2, f"--num-query-groups 2 {_PACKED} --linear-cross-entropy"),
        (3, "--num-query-groups 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
)
def test_losses_and_gradients_are_those_of_the_paper(depths: int, flags: str) -> None:
    with built(f"{_FLAGS} --mtp-num-layers {depths} {flags}") as run:
        model = run.config.model
        named = dict(global_named_parameters(run.chunks))
        batches = run.loaders.train.global_batch(0, 2)
        tokens, labels, mask = (
            torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels", "loss_mask")
        )
        eod = run.config.data.vocab_size - 1
        if _PACKED in flags:
            assert (tokens == eod).sum() > 0, "the samples have borders of documents"
        shape = next_tokens.Shape(
            model.num_layers, depths, 4, model.num_key_value_heads, 0.3, eod + 1, eod if _PACKED in flags else None
        )
        weights = {name: weight.detach().clone().requires_grad_() for name, weight in named.items()}
        loss, means = next_tokens.losses(weights, shape, tokens, labels, mask)
        loss.backward()
        gradients = compute_gradients(run, range(4))
        summed = numbers_by_name(gradients.shared.summed(StopVotes()).tolist())
        assert summed.loss == pytest.approx(float(means[0].detach()), rel=1e-6)
        assert [total / summed.tokens for total in summed.of_parts] == pytest.approx(means[1:].tolist(), rel=1e-6)
        for name, weight in named.items():
            found: Any = weight
            expected = weights[name].grad
            assert expected is not None, name
            distance = (found.main_grad - expected).norm() / expected.norm()
            assert distance < 1e-5, (name, float(distance))
