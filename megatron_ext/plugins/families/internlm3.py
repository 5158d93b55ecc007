"""InternLM3: llama's class, with biases in all matrices or none."""

from dataclasses import replace
from typing import Any

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.llama import LLAMA
from megatron_ext.plugins.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    attention = reading.boolean("attention_bias", False)
    here = str(attention).lower()
    reading.refuse_unless("mlp_bias", attention, False, f"but attention_bias is {here}, and both say of all matrices")
    return LLAMA.read(reading)


INTERNLM3 = replace(
    LLAMA,
    model_type="internlm3",
    read=_read,
    is_common=False,
    other_names={},
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 32768},
    aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    dependent_flags=lambda model: shared.bias_flags(*[not model.disable_bias_linear] * 3),
    is_seldom=True,
)
