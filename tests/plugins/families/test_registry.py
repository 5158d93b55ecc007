"""Every key of a Hugging Face config.json that is read, one family after another: values that no default has, and what
transformers takes for a key that is not there."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.family import usual_values
from megatron_ext.plugins.families.hf_config import hf_config
from megatron_ext.plugins.families.registry import FAMILIES, family_of, obstacles
from tests.support.family_configs import GPT2_WRITTEN, SCALING, WRITTEN, read_config
from tests.support.small_models import LLAMA, small_config

_LAST = "[1,1,1,0]", "[0,0,0,1]"
READ: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
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
FAMILIES_OF_DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama with biases": ({"attention_bias": True, "mlp_bias": True}, {**DECODER, "disable_bias_linear": False}),
    "qwen3_moe as transformers 5 writes it": (
        {"num_local_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
        {
            **{**DECODER, "moe_shared_expert_intermediate_size": None, "moe_router_score_function": "softmax"},
            **{"qk_layernorm": True, "num_experts": 5, "moe_ffn_hidden_size": 24, "moe_router_topk": 1},
            "moe_router_pre_softmax": True,
        },
    ),
}
"""Two of many; tests/distributed/test_huggingface.py compares the logits of every family with transformers'."""


def _problems(folder: Path, content: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read_config(folder, content)
    return [problem.removeprefix(f"{folder}/config.json: ") for problem in caught.value.problems]


@pytest.mark.parametrize("family", FAMILIES_OF_DECODERS)
def test_every_value_of_a_decoder_is_read(family: str, tmp_path: Path) -> None:
    more, flags = FAMILIES_OF_DECODERS[family]
    found = read_config(tmp_path, {**WRITTEN, "model_type": family.split()[0], **more})
    assert found == {**usual_values(), **READ, **flags}


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
    found = read_config(tmp_path, content)
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
        ({"rope_theta": 9.0, "rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, {"rotary_base": 9.0}),
        ({"rope_theta": 9.0, "rope_parameters": {"rope_type": "default"}}, {"rotary_base": 9.0}),
        ({"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"rope_theta": 9.0}}, {"rotary_base": 9.0}),
        ({"rope_parameters": {}, "rope_scaling": SCALING}, {"rope_scaling_factor": 3.0}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": SCALING},
            {"use_rope_scaling": True, "rope_scaling_factor": 3.0, "rotary_base": 10000.0},
        ),
        (
            {"rope_parameters": {**SCALING, "rope_theta": 9.0}, "rope_scaling": SCALING, "rope_theta": 9.0},
            {"rope_scaling_factor": 3.0, "rotary_base": 9.0},
        ),
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
    found = read_config(tmp_path, {**plain, **content})
    assert {name: found[name] for name in expected} == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, only 1 is supported"),
    (
        {"rope_scaling": {**SCALING, "partial_rotary_factor": 0.25}},
        "rope_scaling: partial_rotary_factor is 0.25, only 1 is supported",
    ),
    (
        {"rope_scaling": {**SCALING, "factor": 0}},
        "rope_scaling: factor is 0, and not a positive number",
    ),
    ({"rope_theta": True}, "rope_theta is true, and not a positive number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, and not a positive number"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, and not a positive number"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity, and not a positive number"),
    ({"vocab_size": True}, "vocab_size is true, and not a positive integer"),
    ({"vocab_size": 0}, "vocab_size is 0, and not a positive integer"),
    ({"vocab_size": 77.0}, "vocab_size is 77.0, and not a positive integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and not a positive integer"),
    (
        {"vocab_size": 10**16},
        "vocab_size is 10000000000000000, above 1000000000000000, the largest integer that is read",
    ),
    ({"num_key_value_heads": 4}, "num_attention_heads 6 is not divisible by num_key_value_heads 4"),
    (
        {"quantization_config": {}},
        "quantization_config: quant_method null with these settings is not read; read are fp8, mxfp4, and of "
        "compressed-tensors symmetric 8-bit floats and 4-bit integers without reordering. transformers makes a folder "
        "in bf16 of what it can unquantize: AutoModelForCausalLM.from_pretrained(folder, dtype='bfloat16').dequantize()"
        ".save_pretrained(another)",
    ),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, and not a positive integer"),
    *(
        (
            {"model_type": family, "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            "layer_types names sliding_attention, but there is no use_sliding_window",
        )
        for family in ("qwen2", "qwen3")
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
    found = read_config(tmp_path, {**GPT2_WRITTEN, **changes})
    assert found == {
        **usual_values(),
        **{"attention_dropout": 0.1, "hidden_dropout": 0.1},
        **{"num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 50, "num_attention_heads": 6, "kv_channels": 8},
        **{"num_query_groups": 6, "openai_gelu": False, "norm_epsilon": 3e-5, "vocab_size": 77},
        **{"untie_embeddings_and_output_weights": True, "max_position_embeddings": 99},
        **{"position_embedding_type": "learned_absolute", "swiglu": False, "squared_relu": False},
        **{"normalization": "LayerNorm", "norm_position": "before", "disable_bias_linear": False},
        **{"group_query_attention": False, "qk_layernorm": False, "qk_layernorm_over": "head"},
        **expected,
    }


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "[0,1,1]"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, None),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"model_type": "mixtral"}, None),
        ({"model_type": "mistral"}, None),
        ({"model_type": "ministral"}, None),
        ({"model_type": "ministral", "layer_types": ["sliding_attention", *["full_attention"] * 2]}, "[1,0,0]"),
    ],
)
def test_which_layers_have_a_window(content: dict[str, Any], pattern: str | None, tmp_path: Path) -> None:
    experts = {"num_experts_per_tok": 2} if content["model_type"] in ("qwen3_moe", "mixtral") else {}
    found = read_config(tmp_path, {**WRITTEN, **experts, "sliding_window": 16, **content})
    assert (found["window_size"], found["window_attn_skip_freq"]) == ("15,0", pattern)


@pytest.mark.parametrize(
    ("content", "fixed", "windows"),
    [
        ({"model_type": "smollm3"}, "[0,0,0,1]", None),
        ({"model_type": "smollm3", "no_rope_layer_interval": 2}, "[0,1,0,1]", None),
        ({"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 1]}, None, None),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1, 1, 1], "use_sliding_window": True}, *["[1,0,0,0]"] * 2),
        ({"model_type": "exaone4"}, "[0,0,0,1]", "[1,1,1,0]"),
        ({"model_type": "exaone4", "layer_types": [*["full_attention"] * 3, "sliding_attention"]}, *_LAST),
        ({"model_type": "exaone4", "layer_types": ["full_attention"] * 4, "sliding_window": None}, None, None),
    ],
)
def test_which_layers_rotate(content: dict[str, Any], fixed: str | None, windows: str | None, tmp_path: Path) -> None:
    found = read_config(tmp_path, {**WRITTEN, "num_hidden_layers": 4, "sliding_window": 16, **content})
    assert (found["no_rope_freq"], found["window_attn_skip_freq"]) == (fixed, windows)


def test_mistrals_window_counts_the_querys_own_position() -> None:
    config = small_config({**LLAMA, "window_size": "15,0"})
    assert family_of(config).model_type == "mistral", "Llama has no windows"
    assert hf_config(config, family_of(config), "float32")["sliding_window"] == 16


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


@pytest.mark.parametrize("name", ["apertus", "cohere", "gemma", "granitemoe", "granitemoeshared", "qwen3", "dots1"])
def test_biases_of_an_mlp_are_no_shape_of_a_family_without_them(name: str) -> None:
    """Their tensors would have no place in the export, and its file would be short of them."""
    for biased in (True, False):
        config = small_config(model={**LLAMA, "disable_bias_linear": True, "add_mlp_bias": biased})
        assert ("no --add-mlp-bias" in obstacles(config, FAMILIES[name])) == biased
