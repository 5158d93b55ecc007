"""Every key of a Hugging Face config.json, one family after another, in both directions: values that no default has,
and what transformers takes for a key that is not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.families import FAMILIES, family_of, obstacles, state_dict_mapping
from megatron_ext.config.families.reading import Reading
from megatron_ext.config.families.state_dict_mapping import _grouped
from megatron_ext.config.hf_config import differences, hf_config, read_hf_config
from megatron_ext.config.layers import Attention
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, DataConfig, LayoutConfig, ModelConfig
from megatron_ext.errors import ConfigurationError

SCALING = {
    "rope_type": "llama3",
    "factor": 3.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 33,
}
WRITTEN: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 77,
    "max_position_embeddings": 99,
    "rms_norm_eps": 2e-5,
    "tie_word_embeddings": False,
    "rope_theta": 5000.0,
    "rope_scaling": SCALING,
    "hidden_act": "silu",
}
READ: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 48,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "kv_channels": 10,
    "group_query_attention": True,
    "num_query_groups": 2,
    "norm_epsilon": 2e-5,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 77,
    "max_position_embeddings": 99,
    "rotary_base": 5000.0,
    "use_rope_scaling": True,
    "rope_scaling_factor": 3.0,
    "rope_scaling_low_freq_factor": 1.5,
    "rope_scaling_high_freq_factor": 6.0,
    "rope_scaling_original_max_position_embeddings": 33,
}
DECODER: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_position": "before",
    "qk_layernorm": False,
    "qk_layernorm_over": "head",
    "add_qkv_bias": False,
    "disable_bias_linear": True,
}
MIXTURE: dict[str, Any] = {"moe_shared_expert_intermediate_size": None, "moe_router_score_function": "softmax"}
FAMILIES_OF_DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, DECODER),
    "llama with biases": ({"attention_bias": True, "mlp_bias": True}, {**DECODER, "disable_bias_linear": False}),
    "mistral": ({"sliding_window": None}, DECODER),
    "qwen2": ({"use_sliding_window": False}, {**DECODER, "add_qkv_bias": True}),
    "qwen3": ({"attention_bias": False}, {**DECODER, "qk_layernorm": True}),
    "olmo2": (
        {"attention_bias": False},
        {**DECODER, "norm_position": "after", "qk_layernorm": True, "qk_layernorm_over": "projection"},
    ),
    "mixtral": (
        {"sliding_window": None, "num_local_experts": 5, "num_experts_per_tok": 3},
        {
            **DECODER,
            **MIXTURE,
            **{"num_experts": 5, "moe_ffn_hidden_size": 40, "moe_router_topk": 3, "moe_router_pre_softmax": False},
        },
    ),
    "qwen3_moe": (
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False},
        {
            **DECODER,
            **MIXTURE,
            "qk_layernorm": True,
            **{"num_experts": 5, "moe_ffn_hidden_size": 24, "moe_router_topk": 3, "moe_router_pre_softmax": True},
        },
    ),
    "qwen3_moe as transformers 5 writes it": (
        {"num_local_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
        {
            **DECODER,
            **MIXTURE,
            "qk_layernorm": True,
            **{"num_experts": 5, "moe_ffn_hidden_size": 24, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        },
    ),
}


def _read(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(content))
    return read_hf_config(folder)[1]


def _problems(folder: Path, content: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        _read(folder, content)
    return [problem.removeprefix(f"{folder}/config.json: ") for problem in caught.value.problems]


@pytest.mark.parametrize("family", FAMILIES_OF_DECODERS)
def test_every_value_of_a_decoder_is_read(family: str, tmp_path: Path) -> None:
    more, flags = FAMILIES_OF_DECODERS[family]
    found = _read(tmp_path, {**WRITTEN, "model_type": family.split()[0], **more})
    assert found == {**READ, **flags}


DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_query_groups": 8, "group_query_attention": True},
    "qwen2": {"num_query_groups": 32},
    "qwen3": {"num_query_groups": 32, "kv_channels": 128},
    "olmo2": {"norm_epsilon": 1e-5},
    "mixtral": {
        **{"num_query_groups": 8, "group_query_attention": True, "norm_epsilon": 1e-5, "rotary_base": 1e6},
        **{"max_position_embeddings": 131072, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40},
    },
    "qwen3_moe": {
        **{"num_query_groups": 4, "group_query_attention": True, "max_position_embeddings": 32768},
        **{"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_router_pre_softmax": True},
    },
}


@pytest.mark.parametrize("null", [False, True], ids=["left out", "null"])
@pytest.mark.parametrize("family", DEFAULTS)
def test_what_transformers_takes_for_a_key_that_is_not_there(family: str, null: bool, tmp_path: Path) -> None:
    """null stands for what is usual; where a family has a default of its own, null is no number."""
    required = {"hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3, "vocab_size": 77}
    content: dict[str, Any] = {**required, "num_attention_heads": 32, "model_type": family}
    if family == "mistral":
        content["sliding_window"] = None
    if null:
        content |= {"rope_scaling": None, "rope_parameters": None, "head_dim": None, "layer_types": None}
    found = _read(tmp_path, content)
    expected = {
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 40,
        "num_attention_heads": 32,
        "kv_channels": 2,
        "group_query_attention": False,
        "num_query_groups": 32,
        "norm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 77,
        "max_position_embeddings": 2048,
        "rotary_base": 10000.0,
        "use_rope_scaling": False,
        **DEFAULTS[family],
    }
    if null:
        expected["kv_channels"] = 2
    assert {name: found[name] for name in expected} == expected
    assert "rope_scaling_factor" not in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"rope_theta": 7.0}, {"rotary_base": 7.0, "use_rope_scaling": False}),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, {"rotary_base": 9.0}),
        ({"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"rope_theta": 8.0}}, {"rotary_base": 9.0}),
        ({"rope_parameters": {}, "rope_scaling": SCALING}, {"rope_scaling_factor": 3.0}),
        ({"rope_scaling": {"type": "default"}}, {"use_rope_scaling": False}),
        (
            {"rope_scaling": {"type": "llama3", "original_max_position_embeddings": 64}},
            {
                "use_rope_scaling": True,
                "rope_scaling_factor": 8.0,
                "rope_scaling_low_freq_factor": 1.0,
                "rope_scaling_high_freq_factor": 4.0,
                "rope_scaling_original_max_position_embeddings": 64,
            },
        ),
        ({"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
        ({"num_key_value_heads": 6}, {"group_query_attention": False, "num_query_groups": 6}),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3}, {"num_layers": 3}),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts_per_tok": 8}, {"num_experts": 128}),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True}, {"moe_router_pre_softmax": False}),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 2}, {"moe_router_topk": 2}),
    ],
)
def test_forms_in_which_the_same_is_said(content: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    plain = {**WRITTEN, "model_type": "llama"}
    del plain["rope_scaling"], plain["rope_theta"]
    found = _read(tmp_path, {**plain, **content})
    assert {name: found[name] for name in expected} == expected


WINDOW = (
    "a sliding window, which is not supported. Where no sequence is longer than the window it has no effect: set it "
    "to null in a copy of config.json"
)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"partial_rotary_factor": 0.5}, "rope_parameters: partial_rotary_factor is 0.5, only 1 is supported"),
    (
        {"rope_scaling": {**SCALING, "partial_rotary_factor": 0.25}},
        "rope_parameters: partial_rotary_factor is 0.25, only 1 is supported",
    ),
    (
        {"rope_scaling": {**SCALING, "factor": 0}},
        "rope_parameters: factor is 0, and not a positive number",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3"}},
        "rope_parameters: original_max_position_embeddings is null, and not a positive integer",
    ),
    ({"rope_theta": True}, "rope_parameters: rope_theta is true, and not a positive number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, and not a positive number"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, and not a positive number"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity, and not a positive number"),
    ({"vocab_size": True}, "vocab_size is true, and not a positive integer"),
    ({"vocab_size": 0}, "vocab_size is 0, and not a positive integer"),
    ({"vocab_size": 77.0}, "vocab_size is 77.0, and not a positive integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and not a positive integer"),
    ({"vocab_size": 10**16}, "--vocab-size: 10000000000000000 is above 1000000000000000; use 1000000000000000 or less"),
    ({"num_key_value_heads": 4}, "num_attention_heads 6 is not divisible by num_key_value_heads 4"),
    (
        {"quantization_config": {}},
        "quantization_config: quantized weights are not supported; use the unquantized model",
    ),
    ({"mlp_bias": True}, "mlp_bias is true, but attention_bias is false: biases are in all layers or none"),
    ({"model_type": "mistral", "sliding_window": 16}, f"sliding_window is 16: {WINDOW}"),
    ({"model_type": "mixtral", "sliding_window": 16}, f"sliding_window is 16: {WINDOW}"),
    *(
        ({"model_type": family, "use_sliding_window": True}, f"use_sliding_window is true, {WINDOW}")
        for family in ("qwen2", "qwen3", "qwen3_moe")
    ),
    *(
        (
            {"model_type": family, "layer_types": ["full_attention", "sliding_attention"]},
            f"layer_types names sliding_attention: {WINDOW}",
        )
        for family in ("qwen2", "qwen3", "qwen3_moe")
    ),
    *(
        (
            {"model_type": family, "attention_bias": True},
            "attention_bias is true, which has no flag; only false is supported",
        )
        for family in ("olmo2", "qwen3", "qwen3_moe")
    ),
    (
        {"model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts_per_tok": 1},
        "num_experts_per_tok is 1 and weights are normalized, so that every expert has the weight 1 and the router "
        "cannot be trained",
    ),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_what_our_model_cannot_be_is_refused_by_name(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    content = {**WRITTEN, "model_type": "llama", "sliding_window": None, **changes}
    assert _problems(tmp_path, content) == [problem]


GPT2_WRITTEN: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 48,
    "n_inner": 50,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 99,
    "vocab_size": 77,
    "activation_function": "gelu",
    "layer_norm_epsilon": 3e-5,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"n_inner": None}, {"ffn_hidden_size": 192}),
        ({"activation_function": "gelu_new"}, {"openai_gelu": True}),
        ({"activation_function": "gelu_pytorch_tanh"}, {"openai_gelu": True}),
        ({"activation_function": None}, {"openai_gelu": True}),
        ({"layer_norm_epsilon": None}, {"norm_epsilon": 1e-5}),
        ({"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
        ({"tie_word_embeddings": None}, {"untie_embeddings_and_output_weights": False}),
    ],
)
def test_every_value_of_gpt_2_is_read(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = _read(tmp_path, {**GPT2_WRITTEN, **changes})
    assert found == {
        **{"num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 50, "num_attention_heads": 6, "kv_channels": 8},
        **{"num_query_groups": 6, "openai_gelu": False, "norm_epsilon": 3e-5, "vocab_size": 77},
        **{"untie_embeddings_and_output_weights": True, "max_position_embeddings": 99},
        **{"position_embedding_type": "learned_absolute", "swiglu": False, "squared_relu": False},
        **{"normalization": "LayerNorm", "norm_position": "before", "disable_bias_linear": False},
        **{"group_query_attention": False, "qk_layernorm": False, "qk_layernorm_over": "head"},
        **expected,
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n_head": 5}, "n_embd 48 is not divisible by n_head 5"),
        (
            {"activation_function": "relu"},
            'activation_function is "relu"; supported are gelu_new, gelu_pytorch_tanh, gelu',
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights is false, only true is supported"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is true, only false is supported",
        ),
    ],
)
def test_what_gpt_2_may_not_say(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert _problems(tmp_path, {**GPT2_WRITTEN, **changes}) == [problem]


def _config(**model: Any) -> Config:
    sizes = {
        **{"num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 40, "num_attention_heads": 6, "kv_channels": 10},
        **{"num_query_groups": 2, "group_query_attention": True, "norm_epsilon": 2e-5, "init_method_std": 0.03},
        **{"max_position_embeddings": 99, "rotary_base": 5000.0, "padded_vocab_size": 128, "hidden_dropout": 0.2},
        **{"attention_dropout": 0.3, "untie_embeddings_and_output_weights": True, "disable_bias_linear": True},
        **{"num_experts": 5, "moe_ffn_hidden_size": 24, "moe_router_topk": 3, "moe_aux_loss_coeff": (0.07,)},
        **{"moe_router_load_balancing_type": ("aux_loss",), "moe_z_loss_coeff": 0.01},
    }
    return Config(model=ModelConfig(**{**sizes, **model}), layout=LayoutConfig(), data=DataConfig(vocab_size=77))


OUR_DECODER = {
    **{name: value for name, value in WRITTEN.items() if name != "rope_scaling"},
    **{"rope_scaling": None, "attention_dropout": 0.0},
}
OUR_MIXTURE = {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.07, "output_router_logits": False}


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize(
    ("family", "model", "expected"),
    [
        ("llama", {}, {"attention_bias": False, "mlp_bias": False}),
        ("llama", {"disable_bias_linear": False}, {"attention_bias": True, "mlp_bias": True}),
        (
            "llama",
            {
                "use_rope_scaling": True,
                "rope_scaling_factor": 3.0,
                "rope_scaling_low_freq_factor": 1.5,
                "rope_scaling_high_freq_factor": 6.0,
                "rope_scaling_original_max_position_embeddings": 33,
            },
            {"attention_bias": False, "mlp_bias": False, "rope_scaling": SCALING},
        ),
        ("mistral", {}, {"sliding_window": None}),
        ("qwen2", {}, {"use_sliding_window": False}),
        ("qwen3", {}, {"attention_bias": False, "use_sliding_window": False}),
        ("olmo2", {}, {"attention_bias": False}),
        (
            "mixtral",
            {},
            {**OUR_MIXTURE, "sliding_window": None, "num_local_experts": 5, "intermediate_size": 24},
        ),
        *(
            (
                "qwen3_moe",
                {"moe_router_pre_softmax": before},
                {
                    **OUR_MIXTURE,
                    **{"attention_bias": False, "use_sliding_window": False, "num_experts": 5},
                    **{"moe_intermediate_size": 24, "norm_topk_prob": not before},
                    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
                },
            )
            for before in (True, False)
        ),
    ],
)
def test_every_key_of_a_decoder_is_written(
    family: str, model: dict[str, Any], expected: dict[str, Any], untied: bool
) -> None:
    """The vocabulary is that of the tokenizer, without padding."""
    found = hf_config(_config(**model, untie_embeddings_and_output_weights=untied), FAMILIES[family], "bfloat16")
    assert found == {
        **OUR_DECODER,
        "tie_word_embeddings": not untied,
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "initializer_range": 0.03,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **expected,
    }


@pytest.mark.parametrize("tanh", [True, False])
def test_every_key_of_gpt_2_is_written(tanh: bool) -> None:
    found = hf_config(_config(openai_gelu=tanh, num_experts=None), FAMILIES["gpt2"], "float32")
    assert found == {
        **GPT2_WRITTEN,
        "architectures": ["GPT2LMHeadModel"],
        "initializer_range": 0.03,
        "torch_dtype": "float32",
        "use_cache": True,
        "n_inner": 40,
        "activation_function": "gelu_new" if tanh else "gelu",
        "layer_norm_epsilon": 2e-5,
        "attn_pdrop": 0.3,
        "embd_pdrop": 0.2,
        "resid_pdrop": 0.2,
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"vocab_size": 77, "hidden_size": 48, "add_qkv_bias": False, "num_query_groups": 2}, []),
        ({"vocab_size": 78}, ["--vocab-size is 77 and there 78"]),
        ({"group_query_attention": False}, ["--group-query-attention is true and there false"]),
        ({"num_query_groups": 6}, ["--num-query-groups is 2 and there 6"]),
        ({"norm_epsilon": 1e-6}, ["--norm-epsilon is 2e-05 and there 1e-06"]),
        ({"squared_relu": True}, ["--squared-relu is false and there true"]),
        ({"hidden_dropout": 0.0}, ["--hidden-dropout is 0.2 and there 0"]),
        ({"max_position_embeddings": 4}, ["--max-position-embeddings is 99 and there 4"]),
    ],
)
def test_where_flags_and_a_folders_model_differ(values: dict[str, Any], expected: list[str]) -> None:
    assert differences(_config(add_qkv_bias=False), values) == expected


def test_what_is_no_difference_between_flags_and_a_folder() -> None:
    """A promise about lengths where positions have no parameters; a bias next to those that are in all layers."""
    assert differences(_config(position_embedding_type="rope"), {"max_position_embeddings": 4}) == []
    everywhere = _config(disable_bias_linear=False, add_qkv_bias=True)
    assert differences(everywhere, {"add_qkv_bias": False, "group_query_attention": True}) == []


@pytest.mark.parametrize(("experts", "in_the_way"), [(5, ["no --moe-router-load-balancing-type sinkhorn"]), (None, [])])
def test_a_router_that_no_family_has_is_in_the_way_where_there_is_one(
    experts: int | None, in_the_way: list[str]
) -> None:
    model = {"position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm", "num_experts": experts}
    config = _config(**model, moe_router_load_balancing_type=("sinkhorn",), moe_aux_loss_coeff=(0.0,))
    assert obstacles(config, FAMILIES["mixtral" if experts else "llama"]) == in_the_way
    assert family_of(_config(**model)).model_type == ("mixtral" if experts else "llama")


def test_shapes_of_the_tensors_there(tmp_path: Path) -> None:
    """Of a Llama with biases and padding: fused matrices apart, the vocabulary without its padding."""
    values = _read(tmp_path, {**WRITTEN, "model_type": "llama", "attention_bias": True, "mlp_bias": True})
    config = resolve({**values, "num_layers": 1, "make_vocab_size_divisible_by": 16}, Facts())
    mappings = state_dict_mapping(config, FAMILIES["llama"])
    layer = "model.layers.0"
    assert {name: shape for part in mappings for name, shape in part.tensor_shapes().items()} == {
        "model.embed_tokens.weight": (77, 48),
        "lm_head.weight": (77, 48),
        "model.norm.weight": (48,),
        f"{layer}.input_layernorm.weight": (48,),
        f"{layer}.post_attention_layernorm.weight": (48,),
        **{f"{layer}.self_attn.{part}_proj.weight": (rows, 48) for part, rows in (("q", 60), ("k", 20), ("v", 20))},
        **{f"{layer}.self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", 60), ("k", 20), ("v", 20))},
        f"{layer}.self_attn.o_proj.weight": (48, 60),
        f"{layer}.self_attn.o_proj.bias": (48,),
        **{f"{layer}.mlp.{part}_proj.weight": (40, 48) for part in ("gate", "up")},
        **{f"{layer}.mlp.{part}_proj.bias": (40,) for part in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (48, 40),
        f"{layer}.mlp.down_proj.bias": (48,),
    }


def test_gpt_2s_matrices_lie_transposed_and_its_biases_do_not() -> None:
    config = resolve({**_gpt2_values(), "num_layers": 1, "make_vocab_size_divisible_by": 16}, Facts())
    mappings = state_dict_mapping(config, FAMILIES["gpt2"])
    shapes = {name: shape for part in mappings for name, shape in part.tensor_shapes().items()}
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (48, 144)
    assert shapes["transformer.h.0.attn.c_attn.bias"] == (144,)
    assert shapes["transformer.h.0.mlp.c_fc.weight"] == (48, 50)
    assert shapes["transformer.h.0.mlp.c_proj.weight"] == (50, 48)
    assert shapes["transformer.wte.weight"] == (77, 48)
    assert shapes["transformer.wpe.weight"] == (99, 48)
    assert {part.transposed for part in mappings if part.parameter.name.endswith("bias")} == {False}
    [qkv] = [part for part in mappings if part.parameter.name.endswith("linear_qkv.weight")]
    first = [(span.tensor_start, span.start, span.count) for span in qkv.ranges[:4]]
    assert first == [(0, 0, 8), (48, 8, 8), (96, 16, 8), (8, 24, 8)], "queries, keys and values lie one above the other"


@pytest.mark.parametrize("fused", [True, False])
def test_rows_of_heads_whose_values_have_a_size_of_their_own(fused: bool) -> None:
    """Two groups of three query heads; keys have 10 channels and values 4."""
    attention = Attention(
        **{"kind": "grouped_query", "query_heads": 6, "groups": 2, "head_size": 10, "value_head_size": 4},
        **{"window": None, "rotary": None, "qk_norm": None, "qkv_bias": False, "output_bias": False},
    )
    names = ["qkv"] if fused else ["q", "k", "v"]
    found = [(span.tensor, span.tensor_start, span.start, span.count) for span in _grouped(names, attention)]
    keys, values = (60, 80) if fused else (0, 0)
    q, k, v = names * 3 if fused else names
    assert found == [
        *((q, 0, 0, 30), (k, keys, 30, 10), (v, values, 40, 4)),
        *((q, 30, 44, 30), (k, keys + 10, 74, 10), (v, values + 4, 84, 4)),
    ]


def _gpt2_values() -> dict[str, Any]:
    reading = Reading(GPT2_WRITTEN, {})
    return {**FAMILIES["gpt2"].fixed, **FAMILIES["gpt2"].read(reading)}
