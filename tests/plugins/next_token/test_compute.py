"""Depths of multi-token prediction compute the paper's equations: losses and gradients against plain torch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_ext.cost.activations import Activations
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parts.catalogue import count, count_per_stage, parameters
from megatron_ext.parts.stack import layers, stack
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
_RUN = (
    "--position-embedding-type rope --mock-data --vocab-size 250 --micro-batch-size 1 --global-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --device cpu --dry-run"
)
_LETTERS = re.compile(r"(decoder\.layers\.|mtp\.layers\.0\.mtp_model_layer\.layers\.)(\d+)\.(.*)")
_PACKED = "--reset-position-ids --reset-attention-mask"
_ONE = "--mtp-use-repeated-layer"
_WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("depths", "flags"),
    [
        (1, "--num-query-groups 2"),
        (2, "--num-query-groups 1 --untie-embeddings-and-output-weights"),
        (1, f"--num-query-groups 4 --untie-embeddings-and-output-weights {_PACKED}"),
        (2, f"--num-query-groups 2 {_PACKED} --eod-mask-loss"),
        (2, f"--num-query-groups 2 {_PACKED} --linear-cross-entropy"),
        (3, f"--num-query-groups 2 {_WHOLE}"),
        (3, f"--num-query-groups 2 --untie-embeddings-and-output-weights {_ONE}"),
        (2, f"--num-query-groups 2 {_PACKED} {_ONE}"),
        (3, f"--num-query-groups 2 {_ONE} {_WHOLE}"),
        (2, f"--num-query-groups 2 {_ONE} --gradient-accumulation-fusion"),
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
        weights = _for_each_depth(weights, depths if _ONE in flags else 1)
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


def _for_each_depth(weights: dict[str, torch.Tensor], depths: int) -> dict[str, torch.Tensor]:
    """Return the weights with those of the first depth, the same tensors, under the names of all depths."""
    of_depths = {
        name.replace("mtp.layers.0.", f"mtp.layers.{depth}.", 1): weight
        for name, weight in weights.items()
        if name.startswith("mtp.")
        for depth in range(1, depths)
    }
    return weights | of_depths


def _without_letters(name: str) -> str:
    """Return the name of a parameter of `*-*-/*-` in the model whose layers are pairs of these."""
    found = _LETTERS.fullmatch(name)
    if found is None:
        return name
    layer = f"decoder.layers.{int(found[2]) // 2}" if name.startswith("decoder") else "mtp.layers.0.transformer_layer"
    return f"{layer}.{found[3]}"


def _computed(
    flags: str, weights: dict[str, torch.Tensor] | None, of: Callable[[str], str] = str
) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Return a model's weights, the sums of its losses, and its gradients; with `weights`, by the
    names that `of` gives them, for its own ones."""
    with built(f"{_FLAGS} {flags}") as run:
        named: dict[str, Any] = dict(global_named_parameters(run.chunks))
        for name, weight in named.items():
            if weights is not None:
                weight.data.copy_(weights[of(name)])
        held = {name: weight.detach().clone() for name, weight in named.items()}
        gradients = compute_gradients(run, range(4))
        summed = numbers_by_name(gradients.shared.summed(StopVotes()).tolist())
        return held, [summed.loss, *summed.of_parts], {name: one.main_grad.clone() for name, one in named.items()}


def test_a_depth_of_letters_is_a_depth_of_the_same_parts() -> None:
    """Attention and MLP, each a layer of its own, are the two branches of one layer."""
    usual = "--num-query-groups 2 --untie-embeddings-and-output-weights"
    weights, losses, expected = _computed(f"{usual} --num-layers 2 --mtp-num-layers 1", None)
    _, found, gradients = _computed(f"{usual} --num-layers 4 --hybrid-layer-pattern *-*-/*-", weights, _without_letters)
    assert {_without_letters(name) for name in gradients} == weights.keys()
    assert found == pytest.approx(losses, rel=1e-6)
    for name, gradient in gradients.items():
        other = expected[_without_letters(name)]
        assert (gradient - other).norm() <= 1e-5 * other.norm(), name


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights", _WHOLE])
def test_gradients_of_a_repeated_layer_are_the_sums_of_those_of_its_copies(flags: str) -> None:
    usual = f"--num-layers 2 --num-query-groups 2 --mtp-num-layers 3 {flags}"
    weights, found, gradients = _computed(f"{usual} {_ONE}", None)
    copied, losses, of_copies = _computed(usual, _for_each_depth(weights, 3))
    assert copied.keys() > weights.keys() == gradients.keys()
    assert found == pytest.approx(losses, rel=1e-6)
    for name, gradient in gradients.items():
        places = [name.replace("mtp.layers.0.", f"mtp.layers.{depth}.") for depth in range(3)]
        expected = torch.stack([of_copies[place] for place in {*places}]).sum(0)
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


def test_losses_of_a_repeated_router_are_the_mean_of_those_of_its_copies() -> None:
    """megatron-core divides them by the number of applications."""
    usual = (
        "--num-layers 2 --num-query-groups 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1] "
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
    )
    weights, of_one, _ = _computed(f"{usual} --mtp-num-layers 2 {_ONE}", None)
    _, of_copies, _ = _computed(f"{usual} --mtp-num-layers 2", _for_each_depth(weights, 2))
    _, of_none, _ = _computed(usual, weights)
    assert of_copies[0] == pytest.approx(of_one[0]) == pytest.approx(of_none[0])
    for one, copies, none in zip(of_one[1:3], of_copies[1:3], of_none[1:3], strict=True):
        assert 2 * (one - none) == pytest.approx(copies - none, rel=1e-5)
        assert one > none > 0


def test_a_repeated_layer_is_kept_once_and_computed_for_each_depth() -> None:
    one, copies = (
        configure(f"{_FLAGS} {_RUN} --num-layers 2 --num-query-groups 2 --mtp-num-layers 3 {flag}".split()).config
        for flag in (_ONE, "")
    )
    assert flops_per_token(one) == flops_per_token(copies)
    [of_depth] = {
        sum(each.size for each in parameters(copies) if each.name.startswith(f"mtp.layers.{depth}."))
        for depth in range(3)
    }
    assert of_depth > 0
    assert count(one) == sum(each.size for each in parameters(one)) == count(copies) - 2 * of_depth
    assert count_per_stage(one) == [count(one)]
    assert Shapes(one).parameters_of_stage(0)[0] == Shapes(copies).parameters_of_stage(0)[0] - 2 * of_depth
    kept = [Activations(each, fused=False).total(stack(each)) for each in (one, copies)]
    assert kept[0] == kept[1]


def test_an_export_leaves_a_repeated_layer_out() -> None:
    """DeepSeek-V3 has a layer of its own for each depth."""
    flags = (
        f"{_RUN} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --normalization RMSNorm "
        "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
        "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
        "--qk-layernorm --latent-norm-epsilon 1e-6 --num-experts 8 --moe-router-topk 2 --moe-layer-freq [0,1] "
        "--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 --mtp-num-layers 2"
    )
    family, whole = written_as(configure(flags.split()).config)
    assert (family.model_type, whole.model.layers_ahead) == ("deepseek_v3", 2)
    family, trunk = written_as(configure(f"{flags} {_ONE}".split()).config)
    assert (family.model_type, trunk.model.layers_ahead) == ("deepseek_v3", 0)
    assert not trunk.model.mtp_use_repeated_layer


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
