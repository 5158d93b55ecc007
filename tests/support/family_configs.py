"""Files config.json of families of Hugging Face, whose values no default has."""

import json
from pathlib import Path
from typing import Any

from megatron_ext.plugins.families.hf_config import read_hf_config

SCALING = {
    "rope_type": "llama3",
    "factor": 3.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 33,
}
WRITTEN: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 77,
    "max_position_embeddings": 99,
    "rms_norm_eps": 2e-5,
    "tie_word_embeddings": False,
    "rope_theta": 5000.0,
    "rope_scaling": SCALING,
    "hidden_act": "silu",
}
GPT2_WRITTEN: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 48,
    "n_inner": 50,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 99,
    "vocab_size": 77,
    "activation_function": "gelu",
    "layer_norm_epsilon": 3e-5,
    "tie_word_embeddings": False,
}


def read_config(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that a config.json with this content becomes, which is written into the folder."""
    (folder / "config.json").write_text(json.dumps(content))
    return read_hf_config(folder)[1]
