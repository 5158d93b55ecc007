"""The description of a layer: equal layers are one kind, and everything that sums over layers takes each by its own."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.cost.activations import Activations
from megatron_ext.cost.dry_run import describe
from megatron_ext.cost.flops import active_parameters, flops_per_token
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.traffic import sent
from megatron_ext.parts import stack as described
from megatron_ext.parts.attention.describe import Attention, Rotary
from megatron_ext.parts.catalogue import count, count_per_rank, layer_parameters, parameters
from megatron_ext.parts.stack import Layer, layers, stack
from megatron_ext.rules.part_rules import parts_are_computed_again
from tests.support.small_models import LLAMA, small_config

MIXTURE = {**LLAMA, "num_layers": 4, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def of_two_kinds(model: ModelConfig, number: int) -> Layer:
    """A dense first layer with a window; then mixtures of experts without one."""
    layer = _LAYER(model, number)
    if number > 0:
        return layer
    dense = described.mlp_of(model, model.ffn_hidden_size)
    return replace(layer, mlp=dense, mixer=replace(layer.attention, window=4))


_LAYER = described._layer


@pytest.fixture
def two_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(described, "_layer", of_two_kinds)
    described._stack.cache_clear()
    yield
    described._stack.cache_clear()


def _config(**layout: int) -> Config:
    # Another epsilon than elsewhere: what other tests cached of this model is of one kind.
    return small_config({**MIXTURE, "norm_epsilon": 3e-5}, {"world_size": 1, **layout}, {"train_iters": 1})


def test_layers_of_one_kind_are_equal_and_have_their_own_numbers() -> None:
    held = layers(small_config(LLAMA))
    assert [layer.number for layer in held] == [0, 1, 2, 3]
    assert len(set(held)) == 1
    assert stack(small_config(LLAMA)).kinds == ((held[0], 4),)
    assert len(stack(small_config(LLAMA))[1:3]) == 2


def test_a_share_of_a_heads_channels_is_rotated() -> None:
    found = [Rotary(10000.0, share, None).channels(size) for share, size in ((1.0, 16), (0.5, 16), (0.4, 80))]
    assert found == [16, 8, 32]


@pytest.mark.usefixtures("two_kinds")
def test_every_sum_takes_each_layer_by_its_own() -> None:
    config = _config()
    first, *others = layers(config)
    sizes = [sum(p.size for p in layer_parameters(config, layer)) for layer in (first, others[0])]
    one_expert, mlp = 3 * 64 * 32, 3 * 64 * 96
    assert sizes[1] - sizes[0] == 4 * one_expert + 4 * 64 - mlp
    ends = sum(p.size for p in parameters(config) if not isinstance(p.stage, int))
    assert count(config) == ends + sizes[0] + 3 * sizes[1]
    assert active_parameters(config) == count(config) - 3 * 2 * one_expert
    matrices = sum(p.size for p in parameters(config) if isinstance(p.stage, int) and len(p.shape) > 1)
    # Queries of the first layer see 4 - 4^2 / (2 16) = 3.5 keys, counted as elsewhere half of 16; heads are 4 x 16.
    core = 3 * (4 * 64) * (3.5 + 3 * 8)
    assert flops_per_token(config) == 6 * (250 * 64 + matrices - 3 * 2 * one_expert) + core
    assert "experts              2 of 4 of width 32 for each token, in 3 of 4 layers" in describe(config)


@pytest.mark.usefixtures("two_kinds")
def test_the_planner_takes_every_stage_by_its_own_layers() -> None:
    config = _config(world_size=4, pipeline_model_parallel_size=4)
    shapes, one = Shapes(config), Activations(config, fused=True)
    held = [shapes.parameters_of_stage(stage) for stage in range(4)]
    assert [dense + experts for dense, experts in held] == count_per_rank(config)
    assert [experts for _, experts in held] == count_per_rank(config, experts=True)
    assert held[0][1] == 0 < held[1][1]
    assert shapes.representatives() == [0, 1, 1, 3]
    dense, mixture = (one.layer(layer).total for layer in layers(config)[:2])
    assert dense != mixture
    assert one.total(stack(config)) == dense + 3 * mixture
    assert one.chunk(stack(config)[:2], first=False, last=False).layers == dense + mixture


@pytest.mark.usefixtures("two_kinds")
def test_only_layers_with_experts_send_tokens_to_them() -> None:
    config = _config(world_size=8, pipeline_model_parallel_size=4, expert_model_parallel_size=2)
    to_experts = [sum(term.bytes for term in sent(config, stage) if term.axis == "ep") for stage in range(4)]
    assert to_experts[0] == 0
    assert to_experts[1] == to_experts[2] == to_experts[3] > 0


def _catalogue(layer: Layer) -> dict[str, tuple[int, ...]]:
    prefix = "decoder.layers.0."
    return {p.name.removeprefix(prefix): p.shape for p in layer_parameters(small_config(LLAMA), layer)}


def test_norms_may_stand_after_attention_and_mlp() -> None:
    before = layers(small_config(LLAMA))[0]
    usual, after, both = (_catalogue(replace(before, norm_places=places)) for places in ("before", "after", "both"))
    norms_before = {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
    norms_after = {"post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"}
    assert usual.keys() - after.keys() == norms_before
    assert after.keys() - usual.keys() == norms_after
    assert both.keys() == usual.keys() | after.keys()
    assert {both[name] for name in norms_before | norms_after} == {(64,)}


def _with_norms_after(model: ModelConfig, number: int) -> Layer:
    attention = replace(_LAYER(model, number).attention, qk_norm="projection")
    return replace(_LAYER(model, number), norm_places="after", mixer=attention)


def _recomputing_norms(epsilon: float) -> Config:
    """With an epsilon of its own: nothing that is remembered of other models is of this one."""
    selective = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
    layout = {"tensor_model_parallel_size": 2, "world_size": 2}
    return small_config({**LLAMA, "norm_epsilon": epsilon}, layout, {"train_iters": 1, **selective})


def test_what_norms_after_and_over_whole_projections_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _recomputing_norms(5e-5)
    usual, one = sent(config, 0), Activations(config, fused=False)
    assert one.chunk(stack(config), first=False, last=False).layers < one.total(stack(config))
    assert list(parts_are_computed_again(config, Facts())) == []

    monkeypatch.setattr(described, "_layer", _with_norms_after)
    config = _recomputing_norms(6e-5)
    # Of 4 layers' queries and keys, forward and backward, in 2 microbatches: an fp32 number for each of 2 x 16 tokens.
    [means] = set(sent(config, 0)) - set(usual)
    assert (means.axis, means.collective, means.bytes) == ("tp", "all-reduce", 4 * 2 * 2 * 2 * (2 * 16) * 4)
    # Computing such norms anew would save nothing, and is refused.
    one = Activations(config, fused=False)
    assert one.chunk(stack(config), first=False, last=False).layers == one.total(stack(config))
    [problem] = parts_are_computed_again(config, Facts())
    assert problem.startswith("--recompute-modules layernorm ")
    assert "--norm-position before" in problem


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ({}, 2),
        ({"num_experts": 4, "moe_ffn_hidden_size": 32}, 1),  # tokens are sent to routed experts, not gathered
        ({"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32}, 2),
    ],
)
def test_what_kept_gathers_hold(model: dict[str, Any], inputs: int) -> None:
    layout = {"tensor_model_parallel_size": 2, "world_size": 2, "sequence_parallel": True}
    held = [
        Activations(small_config({**LLAMA, **model}, {**layout, "sequence_parallel_keep_gathered": kept}), fused=True)
        .chunk(stack(small_config({**LLAMA, **model})), first=False, last=False)
        .layers
        for kept in (False, True)
    ]
    assert held[1] - held[0] == 4 * inputs * (16 // 2 * 2 * 64 * 4), "4 layers, half of 2 samples of 16 tokens in fp32"


def test_norms_of_queries_and_keys_and_sizes_of_values() -> None:
    layer = layers(small_config(LLAMA))[0]
    attention: Attention = replace(layer.attention, qk_norm="projection", value_head_size=8)
    found = _catalogue(replace(layer, mixer=attention))
    assert found["self_attention.q_layernorm.weight"] == (4 * 16,)
    assert found["self_attention.k_layernorm.weight"] == (2 * 16,)
    assert found["self_attention.linear_qkv.weight"] == (4 * 16 + 2 * 16 + 2 * 8, 64)
    assert found["self_attention.linear_proj.weight"] == (64, 4 * 8)
    norms = [p for p in layer_parameters(small_config(LLAMA), replace(layer, mixer=attention)) if "q_lay" in p.name]
    assert [p.local_shape(2) for p in norms] == [(4 * 16,)]


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_the_keys_that_a_query_sees(window: int | None) -> None:
    """Half a key a query less than counted one by one, as half of the sequence is for full attention."""
    attention = replace(layers(small_config(LLAMA))[0].attention, window=window)
    counted = sum(min(position + 1, window or 16) for position in range(16)) / 16
    seen = min(window or 16, 16)
    assert attention.mean_keys(16) == pytest.approx(counted - seen / (2 * 16))
