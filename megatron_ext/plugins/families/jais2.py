"""Jais 2: LayerNorm, squared ReLU without a gate; biases of attention, of the MLP, of both or neither."""

from megatron_ext.plugins.families.arcee import ARCEE
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import bias_flags, biases_of_attention, decoder, keys


def _biases(reading: Reading) -> dict[str, bool]:
    attention = reading.boolean("attention_bias", True)
    return bias_flags(attention, attention, reading.boolean("mlp_bias", True))


JAIS2 = Family(
    "jais2",
    "Jais2ForCausalLM",
    ARCEE.names,
    {**ARCEE.flags, "normalization": "LayerNorm"},
    *keys(
        decoder(epsilon="layer_norm_eps", activation="relu2"),
        (
            _biases,
            lambda config: {"attention_bias": config.model.has_qkv_bias, "mlp_bias": config.model.has_mlp_bias},
        ),
    ),
    {"layer_norm_eps": 1e-5, "max_position_embeddings": 8192},
    dependent_flags=biases_of_attention,
    is_seldom=True,
)
