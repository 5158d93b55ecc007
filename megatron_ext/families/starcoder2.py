"""StarCoder2: rotary positions with LayerNorm and GELU, with biases in all matrices or in none."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading

_NAMES = {**shared.DECODER_NAMES, "mlp.linear_fc1": ("mlp.c_fc",), "mlp.linear_fc2": ("mlp.c_proj",)}


def _read(reading: Reading) -> dict[str, Any]:
    shared.refuse_others(reading, {"mlp_type": "default"})
    values = {
        **shared.decoder_values(reading, epsilon="norm_epsilon", activation="gelu_pytorch_tanh"),
        **shared.window_values(reading),
    }
    return {**values, "disable_bias_linear": not reading.boolean("use_bias", True)}


def _write(config: Config) -> dict[str, Any]:
    content = {**shared.decoder_json(config, "norm_epsilon"), **shared.window_json(config)}
    return {**content, "use_bias": not config.model.disable_bias_linear}


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _NAMES,
    {**shared.DECODER_FLAGS, "swiglu": False, "normalization": "LayerNorm"},
    _read,
    _write,
    {
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
)
