"""Global parameter names: what a parameter is called whatever rank, stage or chunk holds it."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_ext.config.parameters import OUTPUT_LAYER, WORD_EMBEDDINGS

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")

# Transformer Engine keeps a norm inside the linear layer that follows it.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def global_named_parameters(
    model_chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter of this rank with its global name (see `config.parameters`).

    Args:
        model_chunks: this rank's chunks, wrapped (DDP) or not.
    Yields:
        (global name, parameter). The last stage's copy of tied word embeddings has the word embeddings' name, and
        is the only parameter whose name another stage also yields.
    """
    for chunk in unwrap_model(list(model_chunks)):
        for name, parameter in chunk.named_parameters():
            yield _global_name(chunk, name), parameter


def _global_name(chunk: torch.nn.Module, name: str) -> str:
    if name == OUTPUT_LAYER and chunk.share_embeddings_and_output_weights:
        return WORD_EMBEDDINGS
    found = _LAYER.match(name)
    if found is None:
        return name
    layer: Any = chunk.get_submodule(f"decoder.layers.{found.group(1)}")
    inner = name[found.end() :]
    for fused, separate in _FUSED_NORMS:
        inner = inner.replace(fused, separate)
    return f"decoder.layers.{layer.layer_number - 1}.{inner}"
