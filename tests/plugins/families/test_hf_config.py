"""No key of a config.json is ignored: each of every family's class of transformers is changed by itself."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.hf_config import read_hf_config, unread_around
from megatron_ext.plugins.families.reading import WITHOUT_BEARING
from megatron_ext.plugins.families.registry import FAMILIES
from tests.support.family_configs import SCALING, WRITTEN
from tests.support.hf_models import quiet_transformers
from tests.support.hf_shapes import MODELS

quiet_transformers()

_CHOSEN = {
    "qwen2": "Qwen2 with windows",
    "flint": "Flint with biases",
    "cohere_compass_text": "Cohere Compass with two bases",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v2": "DeepSeek-V2",
    "falcon": "Falcon 11B",
    "falcon_h1": "Falcon-H1 with norms",
    "granitemoehybrid": "Granite 4 with experts",
    "nemotron_h": "Nemotron-H with experts",
}
"""Families of whose models another one than the first reads every key."""

_SWITCHED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_hidden_layers": 3}
_GROUPS = {"n_group": 4, "topk_group": 2}
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen2_moe"), _SWITCHED),
    **{hybrid: {"mamba_d_head": 12} for hybrid in ("granitemoehybrid", "bamba")},
    **{**dict.fromkeys(("glm_moe_dsa", "mimo_v2_flash"), _GROUPS), "smollm3": {"no_rope_layer_interval": 2}},
}
"""What makes a model read every key."""

_LEFT_OUT = {
    **{"gemma3_text": "layer_types", "ministral": "layer_types", "smollm3": "no_rope_layers", "gpt2": "n_inner"},
    **{
        "glm_moe_dsa": "mlp_layer_types",
        **dict.fromkeys(("mellum", "kolibri1", "cohere_compass_text", "cohere2_moe"), "layer_types"),
    },
}
"""Keys of these models that hide another one, or whose list another number of layers would contradict."""


def _base(family: str) -> dict[str, Any]:
    """Return the config.json of a model of the family, without its type."""
    of_family = {name: one for name, one in MODELS.items() if one["model_type"] == family}
    chosen = of_family[_CHOSEN.get(family, next(iter(of_family)))] | {"pad_token_id": 3}
    kept = {name: value for name, value in chosen.items() if name not in ("model_type", _LEFT_OUT.get(family))}
    return kept | _CHANGES.get(family, {})


BASES = {family: _base(family) for family in FAMILIES}

_OTHER = {
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    "layer_types": ["chunked_attention", "full_attention"],
    "layers_block_type": ["chunked_attention", "full_attention"],
    "mtp_layers_block_type": ["full_attention"],
    "time_step_rank": 7,
    "embedding_initializer_range": 0.5,
    "mlp_only_layers": [0],
    "mtp_layer_types": ["full_attention"],
    "mtp_mlp_layer_types": ["sparse"],
    "dtype": "bfloat16",
    "problem_type": "regression",
    "architectures": ["Other"],
    "id2label": {"0": "no", "1": "yes", "2": "perhaps"},
    "label2id": {"no": 0, "yes": 1, "perhaps": 2},
}
"""Values of keys that no rule makes of the usual one."""

_BEGINNINGS = {"time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual"}
_IMPLEMENTATIONS = {"use_mambapy", "use_associative_scan"}
_OF_SCANS = {*_IMPLEMENTATIONS, "time_step_scale", "time_step_init_scheme"}
_OF_OTHER_SETTINGS = {
    **{key: {*_BEGINNINGS, *_OF_SCANS, "residual_in_fp32"} for key in ("mamba", "falcon_mamba")},
    "jamba": {*_IMPLEMENTATIONS, "use_mamba_kernels"},
    "mamba2": {*_BEGINNINGS, "chunk_size", "residual_in_fp32"},
    "nemotron_h": {
        *(*_BEGINNINGS, "chunk_size", "residual_in_fp32", "expand", "n_shared_experts", "num_nextn_predict_layers"),
        *("mtp_layers_block_type", "moe_shared_expert_overlap", "num_logits_to_keep", "use_mamba_kernels"),
        "mamba_ssm_cache_dtype",
    },
    "granitemoehybrid": {"mamba_chunk_size"},
    "falcon_h1": {"mamba_chunk_size", "mamba_expand", "num_logits_to_keep"},
    "bamba": {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
    "gpt_bigcode": {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"},
    "gpt_neo": {"classifier_dropout"},
    "biogpt": {"layer_norm_eps"},
    "cohere2_moe": {"prefix_dense_sliding_window_pattern"},
    "cohere_compass_text": {"pooling", "sliding_window"},
    "hy_v3": {"enable_moe_fp32_combine"},
    "mellum": {"mtp_layer_types", "mtp_mlp_layer_types", "sliding_window"},
    "codegen": {"n_ctx"},
    "qwen2_moe": {"max_window_layers"},
    "qwen3_moe": {"max_window_layers"},
    "phi3": {"original_max_position_embeddings"},
    "deepseek_v2": {"head_dim"},
    "deepseek_v3": {"num_mtp_layers"},
    "glm4_moe": {"num_mtp_layers"},
    "ernie4_5_moe": {"moe_norm_min"},
    "llama4_text": {"layer_types", "router_jitter_noise"},
    "mpt": {"learned_pos_emb", "init_device", "norm_type"},
    "bloom": {"slow_but_exact"},
    "falcon": {"multi_query"},
    "gpt_neox": {"classifier_dropout", "is_decoder"},
}
"""Keys that a family has and does not read, or not with the settings here."""


def _classes() -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    return {name: CONFIG_MAPPING[name] for name in FAMILIES}


def _changed(key: str, value: Any, kind: str = "") -> Any:
    """Return another value of a key: of the kind that it has, or may have."""
    if key in _OTHER:
        return _OTHER[key]
    if isinstance(value, bool) or (value is None and "bool" in kind):
        return not value
    if isinstance(value, int) or (value is None and "int" in kind):
        return (value or 2) * 2
    if isinstance(value, float):
        return value * 2 if value else 0.5
    return "other"


def _keys(config_class: Any) -> dict[str, Any]:
    """Return every key that the class takes, with its other value."""
    return {one.name: _changed(one.name, one.default, str(one.type)) for one in dataclasses.fields(config_class)}


def _read(folder: Path, content: dict[str, Any]) -> dict[str, Any] | list[str]:
    """Return the values that a config.json becomes, or what is wrong with it."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        return read_hf_config(folder)[1]
    except ConfigurationError as error:
        return error.problems


def _logits(content: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> tuple[Any, Any]:
    """Return what transformers computes with the file's content, and the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = copy.deepcopy(content)
    content.pop("return_dict", None)  # about the form of the answer, which is asked for below
    content.pop("dtype", None)  # about the weights, which are given; Gemma would keep a factor that is rounded to it
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(content.pop("model_type"), **content)).float().eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        for parameter in model.parameters() if weights is None else ():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        output = model(input_ids=torch.arange(48).reshape(2, 24), return_dict=True)
    return output.logits, copy.deepcopy(model.state_dict())


def _makes(expected: torch.Tensor, content: dict[str, Any], weights: dict[str, torch.Tensor]) -> bool:
    """Return whether transformers computes these logits with the file's content."""
    try:
        return torch.equal(_logits(content, weights)[0], expected)
    except Exception:  # whatever transformers raises for keys that do not go together
        return False


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_is_ignored(family: str, tmp_path: Path) -> None:
    """Changed by itself, each has an effect, or is refused by its name; or transformers' own logits do not depend on
    it."""
    base = {"model_type": family, **BASES[family]}
    taken = _read(tmp_path, base)
    assert isinstance(taken, dict)
    silent = {}
    for key, value in _keys(_classes()[family]).items():
        value = value if key not in base or base[key] is None else _changed(key, base[key])
        assert value != base.get(key)
        found = _read(tmp_path, {**base, key: value})
        if isinstance(found, list):
            assert any(key in problem for problem in found), (key, value, found)
        elif found == taken:
            silent[key] = value
    expected, weights = _logits(base)
    # Together, for a model takes long to make; each by itself where they cannot be, or where one has an effect.
    if not _makes(expected, {**base, **silent}, weights):
        for key, value in silent.items():
            logits, _ = _logits({**base, key: value}, weights)
            assert torch.equal(logits, expected), f"{key} {value} changes the model, and is ignored"
    without_bearing = {key for keys in WITHOUT_BEARING.values() for key in keys}
    assert silent.keys() <= without_bearing | _OF_OTHER_SETTINGS.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_tied_where_transformers_ties_them(family: str, tmp_path: Path) -> None:
    """A class of transformers may ignore `tie_word_embeddings`: it would draw an output layer that no file has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = {**BASES[family], "tie_word_embeddings": True}
    if isinstance(_read(tmp_path, {"model_type": family, **content}), dict):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **content))
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
def test_two_names_of_a_key_say_the_same(family: str, tmp_path: Path) -> None:
    """transformers takes some keys by two names; which one wins depends on its version."""
    base = {"model_type": family, **BASES[family]}
    for other, key in _classes()[family].attribute_map.items():
        if key not in base and other not in base:
            continue  # layers of one kind alone
        key, other = (key, other) if key in base else (other, key)
        renamed = {other if name == key else name: value for name, value in base.items()}
        assert _read(tmp_path, renamed) == _read(tmp_path, base) == _read(tmp_path, {**renamed, key: base[key]})
        problems = _read(tmp_path, {**base, other: 2 * base[key]})
        assert isinstance(problems, list)
        said = [f"{name} is {json.dumps(value)}" for name, value in ((key, base[key]), (other, 2 * base[key]))]
        assert any(all(words in one for words in said) for one in problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_settings_by_layer_are_taken_or_refused(family: str, tmp_path: Path) -> None:
    """By the name of their key, where all layers of a family rotate alike."""
    of_kinds = {kind: {"rope_type": "default", "rope_theta": 300.0} for kind in ("full_attention", "sliding_attention")}
    found = _read(tmp_path, {"model_type": family, **BASES[family], "rope_parameters": of_kinds})
    assert isinstance(found, dict) or any("rope_parameters" in problem for problem in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_nobody_knows_is_refused(family: str, tmp_path: Path) -> None:
    base = {"model_type": family, **BASES[family]}
    for key, value in {"query_scale": 2.0, "text_config": {"rope_theta": 3.0}, "per_layer_config": {"0": {}}}.items():
        problems = _read(tmp_path, {**base, key: value})
        assert isinstance(problems, list)
        assert [f"{key} is {json.dumps(value)}, a key that is not known for {family}" in one for one in problems] == [
            True
        ]
        assert _read(tmp_path, {**base, key: None}) == _read(tmp_path, base)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, 'rope_scaling: rope_type is "proportional"'),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim without mscale",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0] * 5}},
            "rope_scaling: short_factor is [1.0]; it needs 5 numbers above 0",
        ),
        ({"rope_scaling": {**SCALING, "type": "yarn"}}, 'rope_type is "llama3", but type is "yarn"'),
        (
            {"rope_scaling": {**SCALING, "rope_theta": 7.0}},
            "rope_parameters: rope_theta is 5000.0, but by rope_scaling, which transformers reads first, it is 7.0",
        ),
        ({"rope_theta": 7.0}, "rope_theta is 7.0, but by rope_parameters, which transformers reads first, it is 5000"),
        # Without a base of its own, the scaling would be taken with the default.
        ({"rope_scaling": SCALING}, "rope_parameters: rope_theta is 5000.0, but by rope_scaling"),
        (
            {
                "rope_parameters": {**SCALING, "rope_theta": 10000.0},
                "rope_scaling": {**SCALING, "factor": 4.0},
            },
            "rope_parameters: factor is 3.0, but by rope_scaling, which transformers reads first, it is 4.0",
        ),
        (
            {"rope_parameters": {**SCALING, "rope_theta": 10000.0}, "rope_scaling": {"rope_type": "default"}},
            'rope_parameters: rope_type is "llama3", but by rope_scaling, which transformers reads first, it is "def',
        ),
        ({"rope_parameters": {"rope_theta": 5000.0, "factor": 2.0}}, "factor is 2.0, which rope_type default does not"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], and not an object"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false", and neither true nor false'),
        ({"attention_bias": "false"}, 'attention_bias is "false", and neither true nor false'),
        ({"rope_interleaved": True}, "rope_interleaved is true, only false is supported"),
        ({"use_mrope": True}, "use_mrope is true, only false is supported"),
    ],
)
def test_what_a_file_says_twice_or_in_another_form_is_not_guessed(
    content: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = {**WRITTEN, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    del base["rope_scaling"], base["rope_theta"]
    problems = _read(tmp_path, {**base, **content})
    assert isinstance(problems, list)
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("family", "content"),
    [
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
        ("llama", {"activation": "swiglu", "pretraining_tp": 1, "_name_or_path": "x", "max_sequence_length": 2048}),
        ("qwen2", {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False}),
        ("qwen3_moe", {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
        ("nemotron", {"kv_channels": 12}),
        ("gpt_oss", {"initial_context_length": 4096, "experts_per_token": 3}),
        ("mimo_v2_flash", {"sliding_window_size": 5}),
        ("starcoder2", {"mlp_type": "default"}),
        ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2}),
        ("gpt2", {"n_ctx": 80, "task_specific_params": {"text-generation": {"do_sample": True}}, "n_inner": None}),
        ("gpt2", {"gradient_checkpointing": False, "summary_activation": None, "_num_labels": 1, "output_past": True}),
    ],
)
def test_keys_of_published_files_are_known(family: str, content: dict[str, Any], tmp_path: Path) -> None:
    """SmolLM2, Falcon 3, Vicuna, Qwen2.5, Qwen3-Coder, GPT-2 and its smaller copies have them."""
    base = {"model_type": family, **BASES[family]} | ({"use_sliding_window": False} if "qwen" in family else {})
    assert _read(tmp_path, {**base, **content}) == _read(tmp_path, base)


def test_the_published_config_of_kimi_linear_is_known(tmp_path: Path) -> None:
    """Kimi-Linear-48B-A3B's, whose keys are others than those that transformers writes."""
    ends = [4, 8, 12, 16, 20, 24, 27]
    rules = [number for number in range(1, 28) if number not in ends]
    linear = {"full_attn_layers": ends, "kda_layers": rules, "head_dim": 128, "num_heads": 32}
    content: dict[str, Any] = {
        **{"model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu"},
        **{"hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True},
        **{"linear_attn_config": {**linear, "short_conv_kernel_size": 4}, "model_max_length": 1048576},
        **{"moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True, "num_attention_heads": 32},
        **{"moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 256, "topk_group": 1},
        **{"num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_shared_experts": 1},
        **{"num_nextn_predict_layers": 0, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446},
        **{"tie_word_embeddings": False, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840},
    }
    found = _read(tmp_path, content)
    assert isinstance(found, dict)
    freq = [int(number not in ends) for number in range(1, 28)]
    assert found["linear_attention_freq"] == str(freq).replace(" ", "")
    assert found["moe_layer_freq"] == str([0] + [1] * 26).replace(" ", "")
    assert found["max_position_embeddings"] == 1048576
    assert found["position_embedding_type"] == "none"
    for change in ({"kda_layers": rules[1:]}, {"use_full_rank_gate": True}):
        problems = _read(tmp_path, {**content, "linear_attn_config": {**linear, **change}})
        assert isinstance(problems, list)
        assert any(next(iter(change)) in problem for problem in problems)


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    base = BASES["deepseek_v3"]
    assert _read(tmp_path, {"model_type": "kimi_k2", **base}) == _read(tmp_path, {"model_type": "deepseek_v3", **base})


def test_the_text_model_of_llama_4_is_read_from_inside(tmp_path: Path) -> None:
    """What stands next to `text_config` says whether embeddings are tied; a number may stand for that queries grow."""
    text = {**BASES["llama4_text"], "model_type": "llama4_text", "for_llm_compressor": False}
    outer = {"model_type": "llama4", "tie_word_embeddings": False, "image_token_index": 5, "vision_config": {}}
    found = _read(tmp_path, {**outer, "text_config": {**text, "attn_temperature_tuning": 4}})
    assert found == _read(tmp_path, text)


def test_keys_next_to_a_text_model_contradict_none_of_its_own_and_are_named(tmp_path: Path) -> None:
    """transformers makes the text model of `text_config` alone: rope_theta next to it is not read."""
    inner = {**BASES["llama4_text"], "model_type": "llama4_text"}
    outer = {"model_type": "llama4", "image_token_index": 5, "vision_config": {"a": 1}, "bos_token_id": 1}
    same = {"vocab_size": inner["vocab_size"]} if "vocab_size" in inner else {}
    _read(tmp_path, {**outer, **same, "text_config": inner})
    assert unread_around(tmp_path) == ["image_token_index", *same]
    [problem] = _read(tmp_path, {**outer, "rope_theta": 7.5, "text_config": inner})
    assert "rope_theta is 7.5 next to text_config, where transformers does not read it" in problem


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true, which transformers does not read; leave it"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is noaux_tc; supported are"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list has other layers than 1"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8, only 0 is supported"),
        ("ernie4_5_moe", {"moe_layer_start_index": 9}, "leave no experts"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is true, only false is supported"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts is 1, only 0 is supported"),
        ("mimo_v2_flash", {"num_key_value_heads": 4}, "num_attention_heads 6 is not divisible by 8, twice"),
        ("mimo_v2_flash", {"rope_parameters": {"rope_theta": 7.0}}, "need those of full_attention and sliding"),
        ("stablelm", {"head_dim": 10}, "head_dim is 10, but transformers makes it"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5, only 1.702 is supported"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, 'quantization_config: quant_method "awq" with'),
    ],
)
def test_what_transformers_computes_otherwise_is_refused(
    family: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    found = _read(tmp_path, {"model_type": family, **BASES[family], **change})
    assert isinstance(found, list)
    assert problem in " ".join(found)


_ABSURD: tuple[Any, ...] = (10**30, 10**310, 1e308, 5e-324, float("inf"), float("nan"), -1, {"a": 1}, ["x"])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_ends_in_a_traceback_and_none_of_another_kind_is_read_as_absent(family: str, tmp_path: Path) -> None:
    base, keys = {"model_type": family, **BASES[family]}, {*_keys(_classes()[family])}
    for key in {*base, *keys, "rope_parameters", "rope_scaling"} - {"model_type"}:
        for value in _ABSURD:
            _read(tmp_path, {**base, key: value})
    of_lists = {"mlp_only_layers", "no_rope_layers", "moe_layers"} & keys
    of_objects = {"rope_parameters", "rope_scaling"} if "rope_parameters" in keys else set[str]()
    # Kimi Linear rotates nothing, whatever is said of it.
    for key in of_lists if family == "kimi_linear" else of_lists | of_objects:
        for value in (False, 0, "", *([[]] if key in of_objects else [])):
            found = _read(tmp_path, {**base, key: value})
            assert isinstance(found, list)
            assert any(f"{key} is {json.dumps(value)}, " in problem for problem in found), (key, value, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_that_cannot_be_read_is_named_alone_by_the_name_in_the_file(family: str, tmp_path: Path) -> None:
    """Nothing is said of what would follow from the number that is taken in its place."""
    base, aliases = {"model_type": family, **BASES[family]}, FAMILIES[family].aliases
    without_bearing = {key for keys in WITHOUT_BEARING.values() for key in keys}
    others = {other: key for key, other in aliases.items()}
    for key, value in base.items():
        if type(value) is not int or key in without_bearing:
            continue
        for name in {key, others.get(key, key), aliases.get(key, key)}:
            found = _read(tmp_path, {name if one == key else one: "x" if one == key else base[one] for one in base})
            if isinstance(found, list):
                assert all(f'config.json: {name} is "x", ' in problem for problem in found)
            else:
                assert (family, key) in {("qwen3_5_moe_text", "intermediate_size"), ("qwen3_moe", "max_window_layers")}


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        ("kimi_linear", {"n_routed_experts": 5}, "n_routed_experts is 5, but num_local_experts is"),
        ("nemotron_h", {"hybrid_override_pattern": "MMMM"}, 'hybrid_override_pattern is "MMMM", but the list of'),
        ("nemotron_h", {"num_hidden_layers": 3}, "num_hidden_layers is 3, but the list of layers has 4"),
        (
            "mimo_v2_flash",
            {"sliding_window_size": 3, "sliding_window": 7},
            "sliding_window is 7, but by",
        ),
        ("qwen3_next", {"mlp_only_layers": ["sliding"]}, 'mlp_only_layers is ["sliding"], and not a list of integers'),
        ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, above 1"),
        ("deepseek_v3", {"n_group": 5}, "n_group 5 does not divide the 12 experts"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group 4 of n_group 3"),
    ],
)
def test_what_a_file_says_twice_or_what_no_run_could_have_is_refused(
    family: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    found = _read(tmp_path, {"model_type": family, **BASES[family], **change})
    assert isinstance(found, list)
    assert any(problem in one for one in found), found


def test_llama3_scaling_without_its_original_length_takes_that_of_the_model(tmp_path: Path) -> None:
    """As transformers does."""
    content: dict[str, Any] = {"model_type": "llama", **BASES["llama"], "max_position_embeddings": 64}
    implied = {**content, "rope_scaling": {name: SCALING[name] for name in SCALING if "original" not in name}}
    said = {**content, "rope_scaling": {**SCALING, "original_max_position_embeddings": 64}}
    assert _read(tmp_path, implied) == _read(tmp_path, said)
    logits, weights = _logits(said)
    assert torch.equal(_logits(implied, weights)[0], logits)
    assert not torch.equal(_logits({**content, "rope_scaling": SCALING}, weights)[0], logits)
