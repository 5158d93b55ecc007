"""What a Hugging Face `config.json` says, as values of our flags, and back. Data alone: nothing that it names is run.

A value that our model cannot have (a sliding window, another kind of rope scaling) is refused by name: a model that
trains as something slightly else is worse than none.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.families import FAMILIES, Family
from megatron_ext.config.options import flag_of
from megatron_ext.config.schema import Config
from megatron_ext.config.untrusted import load_json, read_file
from megatron_ext.errors import ConfigurationError

# What transformers takes for a key that is not in the file, where families differ or it is not None.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "max_position_embeddings": 32768,
    },
}
_GPT2_ACTIVATIONS = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}  # -> --openai-gelu


class _Reading:
    """A `config.json`, and what is wrong with it."""

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.content = content
        self.defaults = defaults
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        value = self.content.get(key, self.defaults.get(key, default))
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problems.append(f"{key} is {json.dumps(value)}, and not a positive integer")
        return 1

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value)
        self.problems.append(f"{key} is {json.dumps(value)}, and not a positive number")
        return 1.0

    def refuse_unless(self, key: str, wanted: Any, default: Any, why: str) -> None:
        value = self.get(key, default)
        if value != wanted:
            self.problems.append(f"{key} is {json.dumps(value)}, {why}")


_LARGEST = 1 << 24  # bytes; one has some 1,000


def read_hf_config(folder: str | Path) -> tuple[Family, dict[str, Any]]:
    """The family of the model in `folder`, and the values of our flags by field name.

    Raises:
        ConfigurationError: there is no readable `config.json`, or our model cannot be what it describes; with every
            problem.
    """
    path = Path(folder) / "config.json"
    try:
        content = load_json(read_file(path, _LARGEST))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    family = FAMILIES.get(str(content.get("model_type")))
    if family is None:
        raise ConfigurationError(
            f"{path}: model_type {json.dumps(content.get('model_type'))} is not supported; "
            f"use one of {', '.join(FAMILIES)}"
        )
    reading = _Reading(content, _DEFAULTS.get(family.model_type, {}))
    if content.get("quantization_config") is not None:
        reading.problems.append("quantization_config: quantized weights are not supported; use the unquantized model")
    values = _gpt2_values(reading) if family.model_type == "gpt2" else _decoder_values(reading, family)
    if reading.problems:
        raise ConfigurationError([f"{path}: {problem}" for problem in reading.problems])
    return family, {**family.flags, **values}


def differences(config: Config, values: Mapping[str, Any]) -> list[str]:
    """Where the configuration is not the model of `values` (from `read_hf_config`), each as a flag with both values."""
    given = {**vars(config.model), "vocab_size": config.data.vocab_size}
    given["group_query_attention"] = config.model.num_key_value_heads != config.model.num_attention_heads
    given["num_query_groups"] = config.model.num_key_value_heads
    if not config.model.disable_bias_linear:
        given["add_qkv_bias"] = False  # it adds nothing to the biases that are there
    if config.model.position_embedding_type == "rope":
        given.pop("max_position_embeddings")  # a promise about lengths, with no parameter behind it
    return [
        f"{flag_of(name)} is {_shown(given[name])} and there {_shown(value)}"
        for name, value in values.items()
        if name in given and given[name] != value
    ]


def hf_config(config: Config, family: Family, dtype: str) -> dict[str, Any]:
    """The content of `config.json`. `dtype` is torch's name of the weights' dtype, such as "bfloat16".

    Rotary settings are written as transformers 4 knows them; transformers 5 reads those too.
    """
    shared = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.data.vocab_size,
        "initializer_range": config.model.init_method_std,
        "tie_word_embeddings": not config.model.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return {**shared, **(_gpt2_json(config) if family.model_type == "gpt2" else _decoder_json(config, family))}


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _decoder_values(reading: _Reading, family: Family) -> dict[str, Any]:
    hidden, heads = reading.integer("hidden_size"), reading.integer("num_attention_heads")
    groups = reading.integer("num_key_value_heads", heads)
    values: dict[str, Any] = {
        "num_layers": reading.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": reading.integer("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": reading.integer("head_dim", max(hidden // heads, 1)),
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "norm_epsilon": reading.number("rms_norm_eps", 1e-6),
        "untie_embeddings_and_output_weights": not reading.get("tie_word_embeddings", False),
        "vocab_size": reading.integer("vocab_size"),
        "max_position_embeddings": reading.integer("max_position_embeddings", 2048),
        **_rotary_values(reading),
    }
    if heads % groups:
        reading.problems.append(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
    reading.refuse_unless("hidden_act", "silu", "silu", "but the MLP here is SwiGLU: silu")
    if family.model_type == "llama":
        biases = bool(reading.get("attention_bias", False))
        values["disable_bias_linear"] = not biases
        reading.refuse_unless(
            "mlp_bias", biases, False, f"but attention_bias is {json.dumps(biases)}: biases are in all layers or none"
        )
    elif family.model_type in ("qwen3", "qwen3_moe"):
        reading.refuse_unless("attention_bias", False, False, "which has no flag; only false is supported")
    _refuse_windows(reading, family)
    if family.experts:
        values |= _expert_values(reading, family)
    return values


def _expert_values(reading: _Reading, family: Family) -> dict[str, Any]:
    if family.model_type == "mixtral":
        experts, width, normalized = reading.integer("num_local_experts"), reading.integer("intermediate_size"), True
    else:
        # transformers 5 writes the name that Mixtral has.
        key = "num_local_experts" if "num_local_experts" in reading.content else "num_experts"
        experts, width = reading.integer(key), reading.integer("moe_intermediate_size")
        normalized = bool(reading.get("norm_topk_prob"))
        dense = "some layers without experts, which is not supported"
        reading.refuse_unless("decoder_sparse_step", 1, 1, dense)
        if reading.get("mlp_only_layers"):
            reading.problems.append(f"mlp_only_layers is {reading.get('mlp_only_layers')}, {dense}")
    used = reading.integer("num_experts_per_tok")
    if used > experts:
        reading.problems.append(f"num_experts_per_tok {used} is above the number of experts, {experts}")
    if normalized and used == 1:
        reading.problems.append(
            "num_experts_per_tok is 1 and weights are normalized, so that every expert has the weight 1 and the "
            "router cannot be trained"
        )
    return {
        "num_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": used,
        # The softmax over the top k alone is the one over all experts, normalized over the top k.
        "moe_router_pre_softmax": not normalized,
    }


def _refuse_windows(reading: _Reading, family: Family) -> None:
    hint = (
        "a sliding window, which is not supported. Where no sequence is longer than the window it has no effect: "
        "set it to null in a copy of config.json"
    )
    without = {"mistral": 4096, "mixtral": None}  # what transformers takes for a missing key
    if family.model_type in without and reading.content.get("sliding_window", without[family.model_type]) is not None:
        reading.problems.append(f"sliding_window is {reading.get('sliding_window')}: {hint}")
    if family.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        reading.refuse_unless("use_sliding_window", False, False, hint)
        if "sliding_attention" in (reading.get("layer_types") or []):
            reading.problems.append(f"layer_types names sliding_attention: {hint}")


def _rotary_values(reading: _Reading) -> dict[str, Any]:
    """Of `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    scaling = reading.get("rope_parameters") or reading.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        reading.problems.append("rope_parameters differ between layers, which is not supported")
        return {}
    rotary = _Reading(scaling, {"rope_theta": reading.get("rope_theta", 10000.0)})
    rotary.refuse_unless("partial_rotary_factor", 1.0, reading.get("partial_rotary_factor", 1.0), "only 1 is supported")
    values: dict[str, Any] = {"rotary_base": rotary.number("rope_theta", 10000.0)}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    values["use_rope_scaling"] = kind == "llama3"
    if kind == "llama3":
        values |= {
            "rope_scaling_factor": rotary.number("factor", 8.0),
            "rope_scaling_low_freq_factor": rotary.number("low_freq_factor", 1.0),
            "rope_scaling_high_freq_factor": rotary.number("high_freq_factor", 4.0),
            "rope_scaling_original_max_position_embeddings": rotary.integer("original_max_position_embeddings"),
        }
    elif kind != "default":
        rotary.problems.append(f"rope_type is {json.dumps(kind)}; only default and llama3 are supported")
    reading.problems += [f"rope_parameters: {problem}" for problem in rotary.problems]
    return values


def _gpt2_values(reading: _Reading) -> dict[str, Any]:
    hidden, heads = reading.integer("n_embd"), reading.integer("n_head")
    if hidden % heads:
        reading.problems.append(f"n_embd {hidden} is not divisible by n_head {heads}")
    activation = reading.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        reading.problems.append(
            f"activation_function is {json.dumps(activation)}; supported are {', '.join(_GPT2_ACTIVATIONS)}"
        )
    reading.refuse_unless("scale_attn_weights", True, True, "only true is supported")
    reading.refuse_unless("scale_attn_by_inverse_layer_idx", False, False, "only false is supported")
    return {
        "num_layers": reading.integer("n_layer"),
        "hidden_size": hidden,
        "ffn_hidden_size": reading.integer("n_inner", 4 * hidden),
        "num_attention_heads": heads,
        "kv_channels": max(hidden // heads, 1),
        "num_query_groups": heads,
        "openai_gelu": _GPT2_ACTIVATIONS.get(activation, False),
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not reading.get("tie_word_embeddings", True),
        "vocab_size": reading.integer("vocab_size"),
        "max_position_embeddings": reading.integer("n_positions"),
    }


def _decoder_json(config: Config, family: Family) -> dict[str, Any]:
    model = config.model
    content: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rotary_base,
        "rope_scaling": None,
        "attention_dropout": 0.0,
    }
    if model.use_rope_scaling:
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
        }
    if family.model_type in ("llama", "qwen3", "qwen3_moe"):
        content["attention_bias"] = not model.disable_bias_linear
    if family.model_type == "llama":
        content["mlp_bias"] = not model.disable_bias_linear
    if family.model_type in ("mistral", "mixtral"):
        content["sliding_window"] = None
    if family.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        content["use_sliding_window"] = False
    return {**content, **(_expert_json(config, family) if family.experts else {})}


def _expert_json(config: Config, family: Family) -> dict[str, Any]:
    model = config.model
    content = {
        "num_experts_per_tok": model.moe_router_topk,
        "router_aux_loss_coef": model.load_balancing_coefficient,
        "output_router_logits": False,
    }
    if family.model_type == "mixtral":
        return {**content, "num_local_experts": model.num_experts, "intermediate_size": model.expert_ffn_hidden_size}
    return {
        **content,
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_ffn_hidden_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt2_json(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        "activation_function": "gelu_new" if model.openai_gelu else "gelu",
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
    }
