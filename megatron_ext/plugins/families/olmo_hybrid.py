"""OLMo hybrid: gated delta rules with norms before them, OLMo-3's attention with norms after it in the others
(`--norm-position after-attention`), with or without rotary positions; `--linear-allow-neg-eigval`,
`--linear-norm-epsilon`.

Files are as published. What transformers 5.23 writes itself divides the convolution's channels into three equal parts,
whatever their sizes (`huggingface/forms.py`), and names norms otherwise.
"""

from functools import partial
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.plugins.families import delta_rules, shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.gated_delta.flags import GatedDeltaFlags

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_RULE = delta_rules.rule_names("linear_attn", in_proj=_PROJECTIONS, **delta_rules.APART)
_epsilon = partial(shared.own_epsilon, "linear_norm_epsilon", 1e-5)


def _read(reading: Reading) -> dict[str, Any]:
    rotary = reading.content.get("rope_parameters")
    rotates = not (isinstance(rotary, dict) and rotary.get("rope_theta", 0.0) is None)
    numbers = shared.layer_numbers(reading)
    usual = shared.all_but_every(reading, 4)
    if all(usual):
        usual[-1] = False
    values = {
        **shared.decoder_values(reading if rotates else reading.changed(rope_parameters=None), biases="attention"),
        **delta_rules.rule_values(reading, "gated_delta_net", usual),
        "position_embedding_type": "rope" if rotates else "none",
        "linear_allow_neg_eigval": reading.boolean("linear_allow_neg_eigval", True),
    }
    freq = values["linear_attention_freq"]
    if freq in (None, shared.pattern([True] * len(numbers))) and reading.is_readable:
        reading.problems.append(f"layer_types must have both {' and '.join(delta_rules.RULE_KINDS)}")
    heads = values["num_attention_heads"]
    keys = reading.integer("linear_num_key_heads", heads)
    size = reading.integer("linear_key_head_dim", max(int(0.75 * values["hidden_size"] / keys), 1))
    sizes = (
        *(reading.integer("linear_conv_kernel_dim", 4), size, reading.integer("linear_value_head_dim", 2 * size), keys),
        reading.integer("linear_num_value_heads", heads),
    )
    return {**values, **dict(zip(delta_rules.RULE_SIZES, sizes, strict=True)), **_epsilon(values["norm_epsilon"])}


def _write(config: Config) -> dict[str, Any]:
    model, content = config.model, shared.decoder_json(config, biases="attention")
    if model.position_embedding_type == "none":
        del content["rope_theta"], content["rope_scaling"]
        content["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    signs = {"linear_allow_neg_eigval": flags_of(model, GatedDeltaFlags).linear_allow_neg_eigval}
    return {**content, **delta_rules.rule_json(config), **signs, **shared.NO_PADDING}


def _dependent(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), **_epsilon(model.norm_epsilon)}


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    {**shared.DECODER_NAMES, **shared.NAMES_WITH_NORMS_AFTER, **_RULE},
    {
        **{"swiglu": True, "normalization": "RMSNorm", "norm_position": "after-attention", "qk_layernorm": True},
        **{"qk_layernorm_over": "projection", "disable_bias_linear": True},
    },
    _read,
    _write,
    {
        **{"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32},
        **{"num_attention_heads": 30, "max_position_embeddings": 65536},
    },
    dependent_flags=_dependent,
    sections=delta_rules.parts_apart(_RULE),
    respelled={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
)
