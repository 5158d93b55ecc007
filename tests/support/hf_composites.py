"""Small models of transformers that have a text model of `hf_shapes` inside of them, next to parts for images."""

from pathlib import Path
from typing import Any

import torch

from tests.support.hf_models import move_weights
from tests.support.hf_shapes import MODELS

COMPOSITES = {
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 with experts",
    "qwen3_vl": "Qwen3",
    "qwen3_vl_moe": "Qwen3-MoE",
    "mistral3": "Mistral",
    "kimi_k25": "DeepSeek-V3",
    "glm4v": "GLM-4",
    "glm4v_moe": "GLM-4.5",
    "gemma3": "Gemma 3",
    "llama4": "Llama 4",
    "internvl": "Qwen2",
    "llava": "Llama 2",
    "idefics3": "Llama 3.2",
    "qwen2_5_vl": "Qwen2",
}
"""Type of the whole -> the shape of its text model. Of others the tensors' names are alike."""

_SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "d_model", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 48),
    **{"image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0], "vocab_size": 64},
}
"""Sizes of the other parts, of those that each has."""


def _axes(*pairs: int, **others: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0, "mrope_section": [*pairs], **others}}


_CHANGES: dict[str, dict[str, Any]] = {
    "glm4v": {"head_dim": None, "attention_bias": True, **_axes(1, 1, 0, partial_rotary_factor=0.5)},
    "glm4v_moe": {"use_qk_norm": False, **_axes(1, 1, 1, partial_rotary_factor=0.5)},
    "qwen3_vl": _axes(2, 2, 2),
    "qwen3_vl_moe": _axes(2, 2, 2),
    "qwen2_5_vl": {"head_dim": None, **_axes(1, 1, 2)},
}
"""Keys of a text model that its class inside of another one does not have, or has in one form alone."""


def write_composite(folder: Path, kind: str, **changes: Any) -> Any:
    """Write a model of `COMPOSITES` with random weights, and return it."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    made = CONFIG_MAPPING[kind]
    usual = made()
    text = {name: value for name, value in MODELS[COMPOSITES[kind]].items() if name != "model_type"}
    tied = bool(text.get("tie_word_embeddings", getattr(usual, "tie_word_embeddings", False)))
    text |= {"model_type": usual.text_config.model_type, "tie_word_embeddings": tied, **_CHANGES.get(kind, {})}
    parts = {name: getattr(usual, name) for name in usual.sub_configs if name != "text_config"}
    small = {
        name: {
            **{key: value for key, value in _SMALL.items() if hasattr(part, key)},
            "model_type": part.model_type,
        }
        for name, part in parts.items()
    }
    config = made(**{"tie_word_embeddings": tied, "text_config": text, **small, **changes})
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config).eval()
    move_weights(model)
    model.save_pretrained(folder)
    return model
