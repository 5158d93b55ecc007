"""What is fuzzed: for each kind of input one whole example, how it is changed, and how one tells that it is read right.

A target is called once with an empty folder and returns a function that makes, writes and reads one input. What is
taken is compared with another reader (json, yaml, the bytes that were written): a wrong success is an AssertionError.
"""

from collections.abc import Callable
from pathlib import Path

from tests.fuzz import data_targets, flag_targets, model_targets
from tests.fuzz.mutations import Read

TARGETS: dict[str, Callable[[Path], Read]] = {
    "flags": flag_targets.flags,
    "yaml": flag_targets.yaml_text,
    "config": flag_targets.config_file,
    "json": flag_targets.json_text,
    "foreign": flag_targets.foreign,
    "hf config": model_targets.hf_config,
    "hf folder": model_targets.hf_folder,
    "safetensors": model_targets.safetensors_file,
    "metadata": model_targets.metadata,
    "checkpoint": model_targets.checkpoint,
    "deepspeed file": model_targets.deepspeed_file,
    "pair": data_targets.pair,
    "bits": data_targets.bin_bits,
    "jsonl": data_targets.jsonl,
    "text": data_targets.text_file,
    "parquet": data_targets.parquet,
    "tokenizer": data_targets.tokenizer,
    "tiktoken": data_targets.tiktoken,
    "metrics": data_targets.metrics,
    "commands": data_targets.commands,
}
