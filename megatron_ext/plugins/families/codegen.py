"""CodeGen: gptj whose queries, values and keys lie in four blocks."""

from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families.gptj import GPTJ, whole_channels
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import QKV

_BLOCKS = 4


def _read(reading: Reading) -> dict[str, Any]:
    values = GPTJ.read(reading)
    if (heads := values["num_attention_heads"]) % _BLOCKS and reading.is_readable:
        reading.problems.append(f"n_head is {heads}, and not divisible by the {_BLOCKS} blocks of its files")
    return values


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    heads = max(model.num_attention_heads // _BLOCKS, 1) * _BLOCKS
    return {**whole_channels(model), "num_attention_heads": heads}


CODEGEN = replace(
    GPTJ,
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    names={**GPTJ.names, QKV: ("attn.qkv_proj",)},
    read=_read,
    dependent_flags=_dependent_flags,
    qkv_blocks=_BLOCKS,
    is_seldom=True,
)
