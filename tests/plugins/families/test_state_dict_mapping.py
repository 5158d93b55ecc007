"""Every key of a Hugging Face config.json that is written, where a folder's model differs from the flags, and which
tensors lie there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, DataConfig, LayoutConfig, ModelConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.attention.describe import Attention
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.plugins.families.hf_config import differences, hf_config
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.registry import FAMILIES, family_of, obstacles
from megatron_ext.plugins.families.state_dict_mapping import _grouped, state_dict_mapping
from tests.support.family_configs import GPT2_WRITTEN, SCALING, WRITTEN, read_config


def _config(**model: Any) -> Config:
    sizes = {
        **{"num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 40, "num_attention_heads": 6, "kv_channels": 10},
        **{"num_query_groups": 2, "group_query_attention": True, "norm_epsilon": 2e-5, "init_method_std": 0.03},
        **{"max_position_embeddings": 99, "rotary_base": 5000.0, "padded_vocab_size": 128, "hidden_dropout": 0.2},
        **{"attention_dropout": 0.3, "untie_embeddings_and_output_weights": True, "disable_bias_linear": True},
        **{
            "swiglu": True,
            "num_experts": 5,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 3,
            "moe_aux_loss_coeff": (0.07,),
        },
        **{"moe_router_load_balancing_type": ("aux_loss",), "moe_z_loss_coeff": 0.01},
    }
    return Config(model=ModelConfig(**{**sizes, **model}), layout=LayoutConfig(), data=DataConfig(vocab_size=77))


OUR_DECODER = {
    **{name: value for name, value in WRITTEN.items() if name != "rope_scaling"},
    **{"rope_scaling": None, "attention_dropout": 0.3},
}


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize(
    ("family", "model", "expected"),
    [
        (
            "llama",
            {
                **{"disable_bias_linear": False, "use_rope_scaling": True, "rope_scaling_factor": 3.0},
                **{"rope_scaling_low_freq_factor": 1.5, "rope_scaling_high_freq_factor": 6.0},
                "rope_scaling_original_max_position_embeddings": 33,
            },
            {"attention_bias": True, "mlp_bias": True, "rope_scaling": SCALING},
        ),
        (
            "qwen3_moe",
            {"moe_router_pre_softmax": True},
            {
                **{"num_experts_per_tok": 3, "router_aux_loss_coef": 0.07, "output_router_logits": False},
                **{"attention_bias": False, "use_sliding_window": False, "sliding_window": None, "num_experts": 5},
                **{"moe_intermediate_size": 24, "norm_topk_prob": False},
                **{"decoder_sparse_step": 1, "mlp_only_layers": []},
            },
        ),
    ],
)
def test_every_key_of_a_decoder_is_written(
    family: str, model: dict[str, Any], expected: dict[str, Any], untied: bool
) -> None:
    """Of two families; tests/distributed/test_huggingface.py gives the files of every one back to transformers. The
    vocabulary is that of the tokenizer, without padding."""
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
    found = hf_config(_config(openai_gelu=tanh, swiglu=False, num_experts=None), FAMILIES["gpt2"], "float32")
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
        ({"num_layers": 3, "window_size": "-1,0"}, []),
        ({"num_layers": 3, "window_size": "4,0"}, ["--window-size is None and there 4,0"]),
        ({"squared_relu": True}, ["--squared-relu is false and there true"]),
        ({"hidden_dropout": 0.0}, []),
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
    values = read_config(tmp_path, {**WRITTEN, "model_type": "llama", "attention_bias": True, "mlp_bias": True})
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
        **{
            "window": None,
            "rotary": None,
            "qk_norm": None,
            "qk_norm_after_rotation": False,
            "qkv_bias": False,
            "output_bias": False,
            "norm": Norm("RMSNorm", 1e-5),
        },
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


def test_a_family_without_a_tensors_name_is_named_with_it() -> None:
    llama = FAMILIES["llama"]
    names = {module: name for module, name in llama.names.items() if module != "mlp.linear_fc2"}
    with pytest.raises(
        ConfigurationError, match=r"family shifty has no name for mlp\.linear_fc2, which this model has"
    ):
        list(
            state_dict_mapping(
                _config(num_experts=None, position_embedding_type="rope"),
                replace(llama, model_type="shifty", names=names),
            )
        )
