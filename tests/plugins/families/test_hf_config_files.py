"""Families of Hugging Face: which one a configuration is, what config.json may say, and folders that mean harm."""

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.checkpoint.dtypes import DTYPES
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parts.catalogue import parameters
from megatron_ext.plugins import families
from megatron_ext.plugins.families.hf_config import hf_config, read_hf_config
from megatron_ext.plugins.families.registry import FAMILIES, family_of, obstacles
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.plugins.huggingface import safetensors as hf_safetensors
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.train.configure import configure
from tests.support.small_models import LLAMA, MAMBA, OLMO2, SCAN, small_config

QWEN3 = {**LLAMA, "qk_layernorm": True}
EXPERTS = {"num_experts": 4, "ffn_hidden_size": 24, "moe_ffn_hidden_size": 24}
MIXTRAL, QWEN3_MOE = {**LLAMA, **EXPERTS}, {**QWEN3, **EXPERTS, "moe_router_pre_softmax": True}
WINDOWS = {"window_size": "7,0", "window_attn_skip_freq": "2"}
GEMMA2 = {"swiglu": False, "geglu": True, "embedding_multiplier": 8.0, "norm_position": "both", **WINDOWS}
GEMMA2 |= {"attention_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
ALIBI = {"position_embedding_type": "alibi", "ffn_hidden_size": 256}
NEOX = {"position_embedding_type": "rope", "rotary_percent": 0.25, "untie_embeddings_and_output_weights": True}
FALCON = {"position_embedding_type": "rope", "disable_bias_linear": True, "group_query_attention": True}
FALCON |= {"num_query_groups": 2}
COHERE = {**LLAMA, "normalization": "LayerNorm", "norm_parameters": "weight", "rotary_interleaved": True}
COHERE |= {"parallel_residual": "one-norm"}
MAMBA2 = {**MAMBA, "hybrid_layer_pattern": "MMMM", "mamba_head_dim": 16, "mamba_num_heads": 8}
NEMOTRON_H = {**MAMBA, "swiglu": False, "squared_relu": True, "untie_embeddings_and_output_weights": True}
FALCON_H1 = {**MAMBA2, "hybrid_layer_pattern": "B-B-", "position_embedding_type": "rope", "mamba_norm": "none"}
MAMBA1 = {**SCAN, "hybrid_layer_pattern": "SSSS", "scan_norm": "none"}
JAMBA = {**SCAN, "hybrid_layer_pattern": "S-*-", "scan_channels": 64}
GRANITE_4 = {**MAMBA2, "hybrid_layer_pattern": "M-*-"}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _write(folder: Path, config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> Config:
    """A model of `CONFIG` with ascending numbers as weights; `changes` replaces tensors, None takes one away."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    ours = resolve(read_hf_config(folder)[1], Facts())
    tensors = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for part in state_dict_mapping(ours, FAMILIES["llama"])
        for name, shape in part.tensor_shapes().items()
    }
    tensors |= changes  # pyright: ignore[reportAssignmentType]
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return ours


def test_a_family_is_a_file() -> None:
    files = Path(families.__file__).parent.glob("*.py")
    assert list(FAMILIES) == sorted(
        path.stem for path in files if re.search(r" = (Family|replace)\(\n", path.read_text())
    )


@pytest.mark.parametrize(
    ("model", "family"),
    [
        (LLAMA, "llama"),
        ({**LLAMA, "disable_bias_linear": False}, "llama"),
        ({**LLAMA, "disable_bias_linear": False, "add_qkv_bias": True}, "llama"),
        ({**LLAMA, "group_query_attention": False, "kv_channels": 20}, "llama"),
        ({**LLAMA, "add_qkv_bias": True}, "qwen2"),
        ({**LLAMA, "add_qkv_bias": True, "add_output_bias": True}, "llama"),
        ({**LLAMA, "add_qkv_bias": True, "add_output_bias": True, "add_mlp_bias": True}, "llama"),
        ({**LLAMA, "add_mlp_bias": True}, "llama"),
        ({**LLAMA, "add_output_bias": True}, "seed_oss"),
        ({**QWEN3_MOE, "add_qkv_bias": True, "add_output_bias": True}, "qwen3_moe"),
        ({**LLAMA, "window_size": "7,0"}, "mistral"),
        ({**LLAMA, "window_size": "7,0", "window_attn_skip_freq": "2"}, "ministral"),
        ({**LLAMA, "rotary_interleaved": True}, "ernie4_5"),
        ({**LLAMA, "no_rope_freq": "4"}, "smollm3"),
        ({**LLAMA, "no_rope_freq": "[1,0,0,0]", **WINDOWS}, "smollm3"),
        ({**QWEN3, "norm_position": "after"}, "exaone4"),
        ({**QWEN3, "qk_layernorm_place": "after"}, "hunyuan_v1_dense"),
        ({**OLMO2, **WINDOWS}, "olmo3"),
        ({**LLAMA, "normalization": "LayerNorm", "norm_parameters": "none"}, "olmo"),
        ({**LLAMA, "swiglu": False, "geglu": True, "openai_gelu": True, "embedding_multiplier": 8.0}, "gemma"),
        ({**LLAMA, "residual_multiplier": 0.5}, "granite"),
        ({**QWEN3, "norm_position": "after", **WINDOWS, "no_rope_freq": "2"}, "exaone4"),
        ({**LLAMA, "window_size": "-1,0"}, "llama"),
        ({**LLAMA, "rotary_interleaved": True, "rotary_percent": 0.5}, "glm"),
        ({**LLAMA, "rotary_percent": 0.5}, "phi3"),
        ({**LLAMA, "normalization": "LayerNorm"}, "stablelm"),
        ({**LLAMA, "normalization": "LayerNorm", "swiglu": False, "squared_relu": True}, "nemotron"),
        ({**LLAMA, "normalization": "LayerNorm", "swiglu": False, "window_size": "7,0"}, "starcoder2"),
        ({**LLAMA, "swiglu": False, "squared_relu": True}, "arcee"),
        ({**QWEN3, **EXPERTS, "qk_layernorm_over": "projection"}, "olmoe"),
        (QWEN3, "qwen3"),
        (OLMO2, "olmo2"),
        (MIXTRAL, "mixtral"),
        (QWEN3_MOE, "qwen3_moe"),
        ({**QWEN3, **EXPERTS}, "qwen3_moe"),
        ({**QWEN3_MOE, "moe_layer_freq": "[0,1,1,0]"}, "qwen3_moe"),
        ({**MIXTRAL, "moe_layer_freq": "1"}, "mixtral"),
        ({**LLAMA, **GEMMA2}, "gemma2"),
        ({**LLAMA, "qkv_clip": 2.0, "normalization": "LayerNorm", "norm_parameters": "none"}, "olmo"),
        ({**LLAMA, "rotary_seq_len_interpolation_factor": 4.0}, "llama"),
        ({**ALIBI, "openai_gelu": True, "embed_layernorm": True}, "bloom"),
        ({**ALIBI, "norm_parameters": "weight", "disable_bias_linear": True, "qkv_clip": 2.0}, "mpt"),
        ({**NEOX, "parallel_residual": "two-norms"}, "gpt_neox"),
        (NEOX, "gpt_neox"),
        ({**NEOX, "parallel_residual": "two-norms", "disable_bias_linear": True, "add_mlp_bias": True}, "gpt_neox"),
        ({**NEOX, "parallel_residual": "one-norm", "lm_head_bias": True, "qk_layernorm": True}, "phi"),
        ({**FALCON, "parallel_residual": "one-norm", "num_query_groups": 1}, "falcon"),
        ({**FALCON, "parallel_residual": "two-norms"}, "falcon"),
        ({**FALCON, "num_query_groups": 1}, "falcon"),
        ({**COHERE, "logits_multiplier": 0.3, "add_qkv_bias": True, "add_output_bias": True}, "cohere"),
        ({**COHERE, **WINDOWS, "no_rope_freq": "2"}, "cohere2"),
        ({**LLAMA, "rotary_interleaved": True, "rotary_percent": 0.5, "norm_position": "both"}, "glm4"),
        ({**LLAMA, "normalization": "LayerNorm", "parallel_residual": "one-norm"}, "stablelm"),
        (MAMBA2, "mamba2"),
        (MAMBA1, "mamba"),
        ({**MAMBA1, "scan_norm": "without-weights"}, "falcon_mamba"),
        (JAMBA, "jamba"),
        ({**JAMBA, "hybrid_layer_pattern": "*E*-", **EXPERTS, "moe_router_pre_softmax": True}, "jamba"),
        (NEMOTRON_H, "nemotron_h"),
        ({**NEMOTRON_H, "hybrid_layer_pattern": "M-M-"}, "nemotron_h"),
        (FALCON_H1, "falcon_h1"),
        (GRANITE_4, "granitemoehybrid"),
        ({**GRANITE_4, "hybrid_layer_pattern": "M-M-"}, "granitemoehybrid"),
        ({"openai_gelu": True}, "gpt2"),
        ({"group_query_attention": True, "num_query_groups": 4}, "gpt2"),
    ],
)
def test_the_family_is_found(model: dict[str, Any], family: str) -> None:
    assert family_of(small_config(model)).model_type == family


@pytest.mark.parametrize(
    ("model", "obstacle"),
    [
        ({**QWEN3, "normalization": "LayerNorm"}, r"--normalization RMSNorm \(not LayerNorm\)"),
        ({**OLMO2, "rotary_percent": 0.5}, r"is olmo2, which has --rotary-percent 1 \(not 0.5\)"),
        ({"squared_relu": True}, "is gpt2, which has no --squared-relu"),
        ({"kv_channels": 20}, r"--kv-channels 16 \(not 20\)"),
        ({**QWEN3, "add_qkv_bias": True}, "is qwen2, which has no --qk-layernorm"),
        ({**QWEN3_MOE, "swiglu": False}, "is qwen3_moe, which has --swiglu"),
        ({**OLMO2, "norm_position": "before"}, r"is olmo2, which has --norm-position after \(not before\)"),
        ({**LLAMA, "norm_position": "after"}, r"is llama, which has --norm-position before \(not after\)"),
        (
            {**MIXTRAL, "moe_shared_expert_intermediate_size": 8, "window_size": "7,0"},
            "is mixtral, which has no --moe-shared-expert-intermediate-size",
        ),
        ({**MIXTRAL, "moe_router_pre_softmax": True}, "is mixtral, which has no --moe-router-pre-softmax"),
        (
            {**QWEN3_MOE, "moe_router_score_function": "sigmoid"},
            r"is qwen3_moe, which has --moe-router-score-function softmax \(not sigmoid\)",
        ),
        ({**COHERE, **WINDOWS}, "is cohere2, which has --no-rope-freq"),
        ({**MIXTRAL, "moe_layer_freq": "[0,1,1,1]"}, "is mixtral, which has no --moe-layer-freq"),
        (
            {**GRANITE_4, "hybrid_layer_pattern": "MM*-"},
            r"hybrid, which has --hybrid-layer-pattern M-\*- \(not MM\*-\)",
        ),
        (
            {**NEMOTRON_H, "untie_embeddings_and_output_weights": False},
            "is nemotron_h, which has --untie-embeddings-and-output-weights",
        ),
        (
            {**JAMBA, "hybrid_layer_pattern": "**S-"},
            r"is jamba, which has --hybrid-layer-pattern \*-S- \(not \*\*S-\)",
        ),
        ({**JAMBA, "scan_channels": 72}, r"is jamba, which has --scan-channels 64 \(not 72\)"),
        ({**GRANITE_4, "mamba_num_heads": 6}, r"which has --mamba-num-heads 4 \(not 6\)"),
        (
            {**GRANITE_4, "mamba_num_heads": 6, "mamba_head_dim": 10},
            r"falcon_h1, .* rope \(not none\), --hybrid-layer-pattern B-B- \(not M-\*-\)",
        ),
        ({"openai_gelu": True, **EXPERTS}, "is phimoe, which has --position-embedding-type rope"),
    ],
)
def test_without_a_family_the_flag_in_the_way_is_named(model: dict[str, Any], obstacle: str) -> None:
    with pytest.raises(ConfigurationError, match=obstacle):
        family_of(small_config(model))


def test_what_some_layers_have_and_others_have_not() -> None:
    mixed = small_config({**MIXTRAL, "moe_layer_freq": "[0,1,1,1]"})
    assert obstacles(mixed, FAMILIES["mixtral"]) == ["no --moe-layer-freq"]
    windows = small_config({**QWEN3, "norm_position": "after", **WINDOWS})
    assert obstacles(windows, FAMILIES["exaone4"]) == ["--no-rope-freq [0,1,0,1] (not None)"]


@pytest.mark.parametrize("model", [{}, LLAMA, QWEN3, {**LLAMA, "add_qkv_bias": True}, MIXTRAL, QWEN3_MOE, OLMO2])
def test_ranges_cover_every_row_once(model: dict[str, Any]) -> None:
    config = small_config(model)
    mappings = state_dict_mapping(config, family_of(config))
    assert [part.parameter for part in mappings] == parameters(config)
    for part in mappings:
        rows = [row for span in part.ranges for row in range(span.start, span.start + span.count)]
        assert sorted(rows) == list(range(part.parameter.true_rows or part.parameter.shape[0]))
        places = [(span.tensor, span.tensor_start + row) for span in part.ranges for row in range(span.count)]
        assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "model",
    [
        *({"openai_gelu": True}, LLAMA, QWEN3, {**LLAMA, "add_qkv_bias": True}, MIXTRAL, QWEN3_MOE, OLMO2),
        *({**LLAMA, "rotary_percent": 0.5, "rotary_interleaved": True}, {**LLAMA, "no_rope_freq": "[0,0,0,1]"}),
        {**QWEN3_MOE, "moe_layer_freq": "[0,1,1,0]"},
        *({**QWEN3, "qk_layernorm_place": "after"}, {**LLAMA, "logits_multiplier": 1 / 49, "softmax_scale": 0.3}),
        {**LLAMA, "window_size": "7,0", "window_attn_skip_freq": "[1,1,0,1]"},
        {**LLAMA, "normalization": "LayerNorm", "swiglu": False, "squared_relu": True, "rotary_percent": 0.25},
        *(NEMOTRON_H, {**NEMOTRON_H, "hybrid_layer_pattern": "M-M-"}, {**GRANITE_4, "softmax_scale": 0.3}),
        *({**JAMBA, "hybrid_layer_pattern": one} for one in ("S-S-", "S-*-", "*-*-", "*-S-")),
        {**JAMBA, **EXPERTS, "hybrid_layer_pattern": "*ESE", "moe_router_pre_softmax": True, "scan_bias": True},
        *(
            FALCON_H1,
            {**FALCON_H1, "softmax_scale": 0.3, "mixer_multipliers": (0.7, 1.3), "mlp_multipliers": (0.9, 2.0)},
        ),
    ],
)
def test_config_json_says_what_the_flags_say(model: dict[str, Any], tmp_path: Path) -> None:
    rotates = model.get("position_embedding_type", "none") != "none"
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 16.0} if rotates else {}
    config = small_config({**model, **scaled})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, family_of(config), "float32")))
    family, values = read_hf_config(tmp_path)
    assert family == family_of(config)
    assert {name: values[name] for name in values if name != "vocab_size"} == {
        name: getattr(config.model, name) for name in values if name != "vocab_size"
    }
    assert values["vocab_size"] == config.data.vocab_size


def test_config_json_has_sizes_that_are_not_the_usual_ones() -> None:
    """Heads that are wider than their share of the hidden size, and experts of another width than the MLP's."""
    config = small_config({**LLAMA, "kv_channels": 20})
    assert config.model.hidden_size // config.model.num_attention_heads != 20
    assert hf_config(config, FAMILIES["llama"], "float32")["head_dim"] == 20
    config = small_config({**MIXTRAL, "moe_ffn_hidden_size": 40})
    assert config.model.ffn_hidden_size != 40
    assert hf_config(config, FAMILIES["mixtral"], "float32")["intermediate_size"] == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "bert"},
            '"bert" is not supported; use one of afmoe, apertus, arcee, aria_text, axk1, bamba, biogpt, bloom, ',
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "every expert has the weight 1"),
        (
            {"model_type": "mamba2", "num_heads": 4, "head_dim": 7, "n_groups": 1, "state_size": 4},
            "num_heads 4 x head_dim 7 is not expand 2 x hidden_size 16",
        ),
        (
            {"model_type": "jamba", "attn_layer_offset": 2, "attn_layer_period": 2},
            "attn_layer_offset 2 is not below attn_layer_period 2",
        ),
        ({"model_type": "mixtral", "num_local_experts": 1}, "num_experts_per_tok 2 is above the number of experts, 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers \[0\] leave no layer with experts"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2 and mlp_only_layers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers is 1, and not a list of integers"),
        ({"model_type": "ministral", "layer_types": ["full_attention"] * 2}, "supported is a list of 1 times full_att"),
        ({"model_type": "ministral", "layer_types": ["chunked_attention"]}, r'layer_types is \["chunked_attention"\]'),
        ({"model_type": "qwen2", "max_window_layers": -1}, "max_window_layers is -1, and not a natural integer"),
        (
            {"model_type": "phi3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            'rope_type is "linear"; only default and longrope',
        ),
        (
            {"rope_scaling": {"type": "mrope", "factor": 4.0}},
            'rope_type is "mrope"; only default, linear, llama3, yarn, longrope and dynamic',
        ),
        ({"rope_parameters": {"rope_type": "axial"}}, 'rope_type is "axial"'),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "differ between layers"),
        ({"model_type": "arcee", "hidden_act": "gelu"}, 'is "gelu", but the MLP here is squared ReLU: relu2'),
        ({"model_type": "starcoder2", "hidden_act": "relu2"}, "supported are gelu_new, gelu_pytorch_tanh, gelu"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", but the MLP here is SwiGLU'),
        ({"num_hidden_layers": "4"}, 'num_hidden_layers is "4", and not a positive integer'),
    ],
)
def test_what_config_json_may_not_say(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ConfigurationError, match=message):
        read_hf_config(tmp_path)


def test_a_window_of_a_type_without_windows_is_refused(tmp_path: Path) -> None:
    """transformers 5.23 attends to all tokens there, but for those that its cache has dropped when it generates."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "sliding_window": 8}))
    with pytest.raises(ConfigurationError, match="sliding_window is 8, a key that is not known for llama"):
        read_hf_config(tmp_path)


def test_an_unknown_type_is_refused_with_every_type_the_nearest_and_the_page(tmp_path: Path) -> None:
    content = {name: value for name, value in CONFIG.items() if name != "model_type"}

    def refused(kind: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**content, "model_type": kind}))
        try:
            read_hf_config(tmp_path)
        except ConfigurationError as error:
            return str(error)
        return ""

    nearest = {
        "lama": "llama",
        "gemma3_txt": "gemma3_text",
        "kimi_k3": "kimi_k2",
        "llama4_txt": "llama4_text",
        "qwen3_mo": "qwen3_moe",
    }
    assert 'model_type "xyz_v4" is not supported' in refused("xyz_v4")
    for kind, near in nearest.items():
        assert f'model_type "{kind}" is not supported (the nearest is {near}); use one of ' in refused(kind)
    said = refused(None)
    assert "model_type null is not supported; use one of " in said
    listed = said.partition("use one of ")[2].partition(". docs/")[0].split(", ")
    page = said.partition("docs/")[2].split()[0]
    assert (Path(__file__).parents[3] / "docs" / page).is_file()
    # Each name in the list is read; each family is in it, with its other names.
    assert listed == sorted(set(listed))
    assert all("is not supported" not in refused(kind) for kind in listed)
    others = {name for one in FAMILIES.values() for name in one.other_names}
    assert {*FAMILIES, "kimi_k2"} | others == set(listed)


def test_auto_map_is_data(tmp_path: Path) -> None:
    """No code that a config.json names is imported."""
    canary = tmp_path / "canary"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    ours = _write(tmp_path, {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"}, "trust_remote_code": True})
    HFFolder(tmp_path).check(ours)
    assert not canary.exists()


def test_load_hf_fills_the_model_and_lists_what_differs(tmp_path: Path) -> None:
    _write(tmp_path)
    run = shlex.split(f"--load-hf {tmp_path} --seq-length 8 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data")
    config = configure([*run, "--device", "cpu"]).config
    assert (config.model.num_layers, config.model.swiglu, config.data.vocab_size) == (1, True, 10)
    with pytest.raises(ConfigurationError) as caught:
        configure([*run, "--num-layers", "2", "--normalization", "LayerNorm", "--num-attention-heads", "4"])
    [problem] = caught.value.problems
    assert "--num-layers is 2 and there 1" in problem
    assert "--normalization is LayerNorm and there RMSNorm" in problem
    assert "--num-attention-heads" not in problem
    with pytest.raises(ConfigurationError, match="--norm-position is after and there before"):
        configure([*run, "--norm-position", "after"])
    with pytest.raises(ConfigurationError, match=r"--load-hf \S*nowhere/config.json: No such file"):
        configure([*run, "--load-hf", str(tmp_path / "nowhere")])


def test_every_bad_tensor_is_listed_with_both_shapes(tmp_path: Path) -> None:
    """Missing, of another shape, or not tied although config.json ties it."""
    layer = "model.layers.0."
    ours = _write(
        tmp_path,
        **{
            f"{layer}self_attn.k_proj.weight": torch.zeros(16, 16),  # as if without grouped-query attention
            f"{layer}mlp.up_proj.weight": None,
            "model.norm.weight": torch.zeros(15),
            "lm_head.weight": torch.ones(10, 16),  # not the embeddings, although config.json ties them
        },
    )
    with pytest.raises(DataError) as caught:
        HFFolder(tmp_path).check(ours)
    for text in (
        "k_proj.weight has shape [16, 16]; by config.json it should be [8, 16]",
        "up_proj.weight is missing; it should have shape [24, 16]",
        "model.norm.weight has shape [15]; by config.json it should be [16]",
        "lm_head.weight differs from the embeddings",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "link.safetensors", "sub/model.safetensors"])
def test_an_index_does_not_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    """Neither upwards, nor from the root, nor through a link."""
    folder = tmp_path / "model"
    folder.mkdir()
    _write(folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="nothing was read"):
        HFFolder(folder)


def test_the_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "1234", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    ours = _write(folder)
    (folder / "model.safetensors").rename(blobs / "abcd")
    (folder / "model.safetensors").symlink_to(Path("../../blobs/abcd"))
    HFFolder(folder).check(ours)


def _file(header: object, data: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def _entry(begin: int, end: int, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "claims"),
        pytest.param(_file(b" " * (33 << 20)), "its header claims 34603008 bytes", id="33 megabytes"),
        (_file({}, length=1 << 60), "its header claims 1152921504606846976 bytes"),
        (_file({"a": _entry(0, 8), "b": _entry(0, 8)}), "tensor b at data offset 0 overlaps"),
        (_file({"a": _entry(0, 8), "b": _entry(4, 12)}, 12), "tensor b at data offset 4 overlaps"),
        (_file({"a": _entry(4, 8)}), "leaves a gap"),
        (_file({"a": _entry(0, 4)}), "its tensors cover 4 of 8 data bytes"),
        (_file({"a": _entry(0, 8)}, 7), "its tensors cover 8 of 7 data bytes"),
        (_file({"a": _entry(0, 8, [1 << 62, 1 << 62])}), "contradicts itself"),
        (_file({"a": _entry(-8, 0)}), "contradicts itself"),
        (_file({"a": 1}), "contradicts itself"),
        (_file(b'{"a": 1, "a": 2}'), "named twice: a"),
        (_file(b"[" * 100_000), "is not valid JSON"),
        (_file([]), "is not a JSON object"),
    ],
)
def test_a_header_is_not_believed(content: bytes, message: str, tmp_path: Path) -> None:
    """It is refused within a second of the processor."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    started = time.process_time()
    with pytest.raises(DataError, match=message):
        hf_safetensors.read_header(path)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("code", DTYPES)
def test_files_are_those_of_the_safetensors_package(code: str, tmp_path: Path) -> None:
    dtype = getattr(torch, DTYPES[code])
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in {"a": (3, 5), "b": (7,), "c": (2, 2)}.items()}
    bits = {name: tensor.view(torch.uint8).numpy() for name, tensor in tensors.items()}
    written, read = tmp_path / "written", tmp_path / "read"
    for name, entry in hf_safetensors.create(written, {n: t.shape for n, t in tensors.items()}, code).items():
        entry.whole(writable=True).view(np.uint8)[...] = bits[name]
    found = load_file(written)
    save_file(tensors, read)
    for name, entry in hf_safetensors.read_header(read).items():
        assert np.array_equal(entry.whole().view(np.uint8), bits[name])
        assert entry.rows(1, 1).tobytes() == bits[name].tobytes()[entry.row_bytes : 2 * entry.row_bytes]
        assert torch.equal(found[name], tensors[name])
