"""The torch-free description of a model: layers, and the catalogue of parameters, with sizes that differ wherever two
could be mistaken for each other. That it is the built model is shown by tests/distributed/test_catalogue.py."""

from dataclasses import replace
from typing import Any, Literal, cast

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.parts import own_parameters, slices
from megatron_ext.parts.attention.describe import Attention, Scaling
from megatron_ext.parts.catalogue import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    parameters,
    stages,
)
from megatron_ext.parts.experts.describe import Experts
from megatron_ext.parts.mlp.describe import Mlp
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.stack import Layer, layers, residual_std, stack
from tests.support.small_models import LLAMA, MIXTURE, distinct_config, small_config


def test_names_are_unique_and_norms_and_biases_do_not_decay() -> None:
    catalogue = parameters(small_config({"qk_layernorm": True}))
    assert len({parameter.name for parameter in catalogue}) == len(catalogue)
    for parameter in catalogue:
        assert parameter.decay == (parameter.name.endswith(".weight") and "norm" not in parameter.name)


def test_padding_is_known_where_there_is_any() -> None:
    by_name = {parameter.name: parameter for parameter in parameters(small_config(LLAMA))}
    assert by_name[WORD_EMBEDDINGS].true_rows == by_name[OUTPUT_LAYER].true_rows == 250
    unpadded = parameters(small_config({"padded_vocab_size": 250}))
    assert [parameter.true_rows for parameter in unpadded] == [None] * len(unpadded)


def test_interleaving_deals_the_layers_out_in_turn() -> None:
    layout = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "world_size": 2}
    config = small_config({"num_layers": 8}, layout)
    held = {parameter.stage: stages(config, parameter) for parameter in parameters(config)}
    assert [held[layer] for layer in range(8)] == [[0], [0], [1], [1], [0], [0], [1], [1]]
    assert held["output"] == [1]


def test_the_slices_of_a_stride_of_two() -> None:
    """The picture at the head of parts/slices.py: the second rank has the second half of the gate and of the rest."""
    assert slices.pieces(8, 2, 0, 2) == [(0, 0, 2), (4, 2, 2)]
    assert slices.pieces(8, 2, 1, 2) == [(2, 0, 2), (6, 2, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shards_of_all_ranks_are_the_whole(ranks: int) -> None:
    """Every row and column of every parameter lies in one rank's shard, or whole on all of them."""
    for parameter in parameters(small_config(LLAMA)):
        shape = (*parameter.shape, 1)[:2]
        held = [[0] * shape[1] for _ in range(shape[0])]
        for rank in range(ranks):
            columns = range(shape[1])[slices.columns(parameter, rank, ranks)]
            rows = slices.rows(parameter, rank, ranks)
            local = (*parameter.local_shape(ranks), 1)[:2]
            assert (sum(piece.size for piece in rows), len(columns)) == local
            assert [piece.in_shard for piece in rows] == [sum(p.size for p in rows[:at]) for at in range(len(rows))]
            for piece in rows:
                for row in range(piece.start, piece.start + piece.size):
                    for column in columns:
                        held[row][column] += 1
        assert {count for row in held for count in row} == {1 if parameter.tp_dim is not None else ranks}


def test_a_layer_is_what_the_flags_say() -> None:
    model = {
        **{"position_embedding_type": "rope", "rotary_base": 7.0, "rotary_percent": 0.35, "swiglu": True},
        **{"rope_scaling_factor": 2.0, "rope_scaling_low_freq_factor": 3.0, "rope_scaling_high_freq_factor": 5.0},
        **{"rope_scaling_original_max_position_embeddings": 11, "normalization": "RMSNorm", "norm_epsilon": 0.25},
        **{"qk_layernorm": True, "qk_layernorm_over": "projection", "norm_position": "after"},
        **{"disable_bias_linear": True, "add_qkv_bias": True, "num_experts": 3, "moe_ffn_hidden_size": 24},
        **{"moe_router_topk": 2, "moe_shared_expert_intermediate_size": 56},
    }
    first = layers(distinct_config({**model, "use_rope_scaling": True}))[0]
    assert first == Layer(
        number=0,
        mixer=Attention(
            kind="grouped_query",
            query_heads=6,
            groups=2,
            head_size=10,
            value_head_size=10,
            window=None,
            rotary=first.attention.rotary,
            qk_norm_after_rotation=False,
            qk_norm="projection",
            norm=Norm("RMSNorm", 0.25),
            qkv_bias=True,
            output_bias=False,
        ),
        mlp=Experts(3, 2, Mlp(True, "silu", 24, False), Mlp(True, "silu", 56, False)),
        norm=Norm("RMSNorm", 0.25),
        norm_places="after",
    )
    rotary = first.attention.rotary
    assert rotary is not None
    assert (rotary.base, rotary.percent, rotary.scaling) == (7.0, 0.35, Scaling("llama3", (2.0,), 11, 3.0, 5.0))
    assert rotary.channels(10) == 3, "rounded down"
    assert first.attention.qk_norm_sizes == (60, 20)
    assert (first.norms_before, first.norms_after) == (False, True)
    assert [(branch.before, branch.after) for branch in first.branches] == [
        (None, "post_self_attn_layernorm"),
        (None, "post_mlp_layernorm"),
    ]
    assert first.inner == Mlp(True, "silu", 24, False)
    plain = layers(distinct_config({**model, "num_experts": None}))[0]
    assert plain.attention.rotary == replace(rotary, scaling=None)
    assert (plain.mlp, plain.experts) == (Mlp(True, "silu", 40, False), None)
    values = replace(first.attention, value_head_size=4)
    assert (values.key_size, values.value_size, values.context_size) == (20, 8, 24)
    assert values.core_flops(8) == 2 * 6 * (10 + 4) * 4.0
    assert [replace(values, window=window).mean_keys(8) for window in (None, 4, 8, 100)] == [4.0, 3.0, 4.0, 4.0]
    assert residual_std(distinct_config()) == 0.03 / 8**0.5
    for flags, activation in (
        ({}, "gelu"),
        ({"openai_gelu": True}, "gelu_tanh"),
        ({"squared_relu": True}, "squared_relu"),
        ({"swiglu": True}, "silu"),
    ):
        inner = layers(distinct_config(flags))[0].inner
        assert inner is not None
        assert inner.activation == activation


def test_slices_of_layers_are_one_object_and_share_their_kinds() -> None:
    whole = stack(distinct_config())
    part = whole[1:3]
    assert part is whole[1:3]
    assert [layer.number for layer in part] == [1, 2]
    assert part.kinds == ((next(iter(whole)), 2),)
    assert part.kinds[0][0] is next(iter(whole))
    assert (whole.count(lambda layer: layer.experts), whole.total(lambda _: 1.5)) == (0, 6.0)


def test_the_catalogue_of_a_layer() -> None:
    """Every field of every parameter, of a model with biases and one with experts."""
    sp: dict[str, Any] = {"sequence_parallel": True}
    normal: tuple[Literal["normal"], float] = ("normal", 0.03)
    small: tuple[Literal["normal"], float] = ("normal", 0.03 / 8**0.5)
    matrix: dict[str, Any] = {"by_element": False}
    found = [parameter for parameter in parameters(distinct_config({"swiglu": True})) if parameter.stage == 2]
    at = "decoder.layers.2"
    assert sorted(found, key=lambda one: one.name) == sorted(
        [
            *(
                Parameter(f"{at}.{norm}.weight", (48,), 2, "ones", **sp)
                for norm in ("input_layernorm", "pre_mlp_layernorm")
            ),
            *(
                Parameter(f"{at}.{norm}.bias", (48,), 2, "zeros", **sp)
                for norm in ("input_layernorm", "pre_mlp_layernorm")
            ),
            Parameter(f"{at}.self_attention.linear_proj.bias", (48,), 2, "zeros", **sp),
            Parameter(f"{at}.self_attention.linear_proj.weight", (48, 60), 2, *small, tp_dim=1, **matrix),
            Parameter(
                f"{at}.self_attention.linear_qkv.weight",
                (100, 48),
                2,
                *normal,
                tp_dim=0,
                sections=(30, 10, 10),
                **matrix,
            ),
            Parameter(f"{at}.self_attention.linear_qkv.bias", (100,), 2, "zeros", tp_dim=0),
            Parameter(f"{at}.mlp.linear_fc1.weight", (80, 48), 2, *normal, tp_dim=0, tp_stride=2, **matrix),
            Parameter(f"{at}.mlp.linear_fc1.bias", (80,), 2, "zeros", tp_dim=0, tp_stride=2),
            Parameter(f"{at}.mlp.linear_fc2.weight", (48, 40), 2, *small, tp_dim=1, **matrix),
            Parameter(f"{at}.mlp.linear_fc2.bias", (48,), 2, "zeros", **sp),
        ],
        key=lambda one: one.name,
    )
    found = [one for one in parameters(distinct_config({**MIXTURE, "norm_position": "after"})) if one.stage == 2]
    by_name = {one.name.removeprefix(f"{at}."): one for one in found}
    assert by_name["mlp.router.weight"] == Parameter(
        f"{at}.mlp.router.weight", (6, 48), 2, *normal, **sp, by_element=True
    )
    assert by_name["mlp.experts.0.linear_fc1.weight"] == Parameter(
        f"{at}.mlp.experts.0.linear_fc1.weight", (48, 48), 2, *normal, tp_dim=0, tp_stride=2, expert=0, **matrix
    )
    assert by_name["mlp.experts.5.linear_fc2.weight"] == Parameter(
        f"{at}.mlp.experts.5.linear_fc2.weight", (48, 24), 2, *small, tp_dim=1, expert=5, **matrix
    )
    assert by_name["mlp.shared_experts.linear_fc1.weight"].shape == (64, 48)
    assert by_name["post_self_attn_layernorm.weight"].shape == by_name["post_mlp_layernorm.weight"].shape == (48,)
    assert "input_layernorm.weight" not in by_name


@pytest.mark.parametrize(("size", "untied", "expected"), [(1, False, [0]), (2, False, [0, 1]), (2, True, [0])])
def test_stages_of_word_embeddings(size: int, untied: bool, expected: list[int]) -> None:
    layout = {"world_size": size, "pipeline_model_parallel_size": size}
    config = distinct_config({"untie_embeddings_and_output_weights": untied}, layout)
    embeddings, positions = parameters(config)[:2]
    assert (stages(config, embeddings), stages(config, positions)) == (expected, [0])
    assert stages(config, parameters(config)[-1]) == [size - 1]


@pytest.mark.parametrize(
    ("model", "matrix", "embedding"),
    [
        ({}, ("normal", 0.03), ("normal", 0.03)),
        ({"embedding_init_method_std": 0.5}, ("normal", 0.03), ("normal", 0.5)),
        ({"init_method_xavier_uniform": True}, ("uniform", (2 / 148) ** 0.5), ("uniform", (2 / 148) ** 0.5)),
        (
            {"init_method_xavier_uniform": True, "embedding_init_method_std": 0.5},
            ("uniform", (2 / 148) ** 0.5),
            ("normal", 0.5),
        ),
        (
            {"init_method_xavier_uniform": True, "embedding_init_method_std": 0.03},
            ("uniform", (2 / 148) ** 0.5),
            ("uniform", (2 / 148) ** 0.5),
        ),
    ],
)
def test_how_matrices_and_embeddings_begin(model: dict[str, Any], matrix: Any, embedding: Any) -> None:
    by_name = {one.name: (one.init, one.std) for one in parameters(distinct_config(model))}
    assert by_name["decoder.layers.1.self_attention.linear_qkv.weight"] == matrix
    assert by_name["embedding.word_embeddings.weight"] == embedding


@pytest.mark.parametrize("flag", ["init_method_xavier_uniform", "use_mup"])
def test_padding_of_the_vocabulary_has_no_bearing_on_how_a_model_begins(flag: str) -> None:
    """Layouts differ in it: rows are a multiple of 128 x TP."""
    begun = []
    for rows in (128, 256, 512):
        model = {flag: True, "padded_vocab_size": rows, "untie_embeddings_and_output_weights": True}
        begun.append({one.name: (one.init, one.std) for one in parameters(distinct_config(model))})
    assert begun[0] == begun[1] == begun[2]


@pytest.mark.parametrize(
    ("parameter", "problem"),
    [
        (Parameter("mix", (48,), 0, "zeros"), None),
        (Parameter("mix", (4, 48), 0, "uniform", 0.1, tp_dim=0), None),
        (Parameter("mix", (4, 48), 0, "normal", 0.1, tp_dim=1), None),
        (Parameter("mix", (48,), 0, "uniform", 0.1), "cannot begin with random numbers"),
        (
            Parameter("mix", (4, 48), 0, cast(Any, "xavier"), 0.1),
            "cannot begin by init='xavier'; use normal, uniform, ",
        ),
        (Parameter("mix", (4, 48), 0, "normal"), "cannot be drawn with std=0; give a positive one"),
        (Parameter("mix", (4, 48, 2), 0, "normal", 0.1), "cannot begin with random numbers"),
        (Parameter("mix", (48,), 0, "zeros", expert=0), "expert, tp_stride and true_rows belong to experts"),
        (Parameter("mix", (48,), 0, "zeros", tp_stride=2), "expert, tp_stride and true_rows belong to experts"),
        (Parameter("mix", (48,), 0, "zeros", true_rows=48), "expert, tp_stride and true_rows belong to experts"),
        (Parameter("mix", (48,), 0, "zeros", tp_dim=1), "cannot be divided in its dimension 1 over 2"),
        (Parameter("mix", (48,), 0, "zeros", tp_dim=-1), "cannot be divided in its dimension -1 over 2"),
        (Parameter("mix", (7, 48), 0, "zeros", tp_dim=0), "cannot be divided in its dimension 0 over 2"),
    ],
)
def test_own_parameters_that_cannot_be_are_refused(parameter: Parameter, problem: str | None) -> None:
    config = distinct_config({}, {"world_size": 2, "tensor_model_parallel_size": 2})
    own = own_parameters.with_own_parameters(config, lambda _, layer: [parameter] if layer.number == 3 else [])
    assert own_parameters.names(config) == []
    if problem is None:
        [found] = [one for one in parameters(own) if one.name.endswith(".mix")]
        assert found == replace(parameter, name="decoder.layers.3.mix", stage=3)
        assert own_parameters.names(own) == ["mix"]
        return
    with pytest.raises(ConfigurationError, match=f"layer_parameters: mix of shape .*{problem}"):
        parameters(own)
