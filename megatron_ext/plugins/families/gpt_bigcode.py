"""SantaCoder, StarCoder: gpt2 with one key and value of all heads, or of each head (`multi_query`)."""

from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.gpt2 import GPT2
from megatron_ext.plugins.families.reading import Reading

_IN_FP32 = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")


def _read(reading: Reading) -> dict[str, Any]:
    reading.understand(*_IN_FP32, "num_key_value_heads", "inference_runner", "max_batch_size", "max_sequence_length")
    reading.understand("pad_key_length", "pre_allocate_kv_cache", "validate_runner_input", "attention_softmax_in_fp32")
    values = GPT2.read(reading)
    heads = values["num_attention_heads"]
    groups = 1 if reading.boolean("multi_query", True) else heads
    return {**values, "group_query_attention": groups != heads, "num_query_groups": groups}


def _write(config: Config) -> dict[str, Any]:
    return {**GPT2.write(config), "multi_query": config.model.num_key_value_heads == 1}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    groups = 1 if model.num_key_value_heads == 1 else model.num_attention_heads
    shared_keys = {"num_query_groups": groups, "group_query_attention": groups != model.num_attention_heads}
    return {**shared.heads_fill_width(model), **shared_keys}


GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    read=_read,
    write=_write,
    dependent_flags=_dependent_flags,
    qkv_by_groups=True,
    transposed=frozenset(),
    is_seldom=True,
    other_names={},
)
