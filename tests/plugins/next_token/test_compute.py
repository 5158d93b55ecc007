"""Depths of multi-token prediction compute the paper's equations: losses and gradients against plain torch."""

import re
from typing import Any

import pytest
import torch

from megatron_ext.model.names import global_named_parameters
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families.registry import written_as
from megatron_ext.train.configure import configure
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
_LETTERS = re.compile(r"(decoder\.layers\.|mtp\.layers\.0\.mtp_model_layer\.layers\.)(\d+)\.(.*)")
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


def _without_letters(name: str) -> str:
    """Return the name of a parameter of `*-*-/*-` in the model whose layers are pairs of these."""
    found = _LETTERS.fullmatch(name)
    if found is None:
        return name
    layer = f"decoder.layers.{int(found[2]) // 2}" if name.startswith("decoder") else "mtp.layers.0.transformer_layer"
    return f"{layer}.{found[3]}"


def _computed(
    flags: str, weights: dict[str, torch.Tensor] | None
) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Return a model's weights, the sums of its losses, and its gradients; with `weights` for its own ones."""
    with built(f"{_FLAGS} {flags}") as run:
        named: dict[str, Any] = dict(global_named_parameters(run.chunks))
        for name, weight in named.items():
            if weights is not None:
                weight.data.copy_(weights[_without_letters(name)])
        held = {name: weight.detach().clone() for name, weight in named.items()}
        gradients = compute_gradients(run, range(4))
        summed = numbers_by_name(gradients.shared.summed(StopVotes()).tolist())
        return held, [summed.loss, *summed.of_parts], {name: one.main_grad.clone() for name, one in named.items()}


def test_a_depth_of_letters_is_a_depth_of_the_same_parts() -> None:
    """Attention and MLP, each a layer of its own, are the two branches of one layer."""
    usual = "--num-query-groups 2 --untie-embeddings-and-output-weights"
    weights, losses, expected = _computed(f"{usual} --num-layers 2 --mtp-num-layers 1", None)
    _, found, gradients = _computed(f"{usual} --num-layers 4 --hybrid-layer-pattern *-*-/*-", weights)
    assert {_without_letters(name) for name in gradients} == weights.keys()
    assert found == pytest.approx(losses, rel=1e-6)
    for name, gradient in gradients.items():
        other = expected[_without_letters(name)]
        assert (gradient - other).norm() <= 1e-5 * other.norm(), name


def test_an_export_leaves_depths_of_letters_out() -> None:
    """Families with letters have no depths: a model of them is written as it is before its depths."""
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --normalization RMSNorm "
        "--squared-relu --disable-bias-linear --position-embedding-type none --untie-embeddings-and-output-weights "
        "--hybrid-layer-pattern M-*-/*-/*- --mamba-num-groups 2 --mamba-head-dim 16 --attention-dropout 0 "
        "--hidden-dropout 0 --mock-data --vocab-size 250 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 "
        "--lr 1e-3 --device cpu --dry-run"
    )
    config = configure(flags.split()).config
    assert config.model.layers_ahead == 4
    family, trunk = written_as(config)
    assert (family.model_type, trunk.model.hybrid_layer_pattern) == ("nemotron_h", "M-*-")
    assert trunk.model.layers_ahead == 0
    assert [layer.next_token for layer in layers(trunk)] == [None] * 4
