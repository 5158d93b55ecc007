"""Defines global parameter names: the same whatever rank, stage or chunk holds the parameter."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import OUTPUT_LAYER, WORD_EMBEDDINGS, parameters
from megatron_ext.parts.parameter import Parameter

_EXPERTS = "mlp.experts."
_EXPERT_RANGE = re.compile(r"\.experts\.(\d+):(\d+)\.")

_LAYER = re.compile(r"^(?:decoder\.layers\.(\d+)|mtp\.layers\.\d+\.mtp_model_layer(?:\.layers\.\d+)?)\.")

# Transformer Engine keeps a norm inside the linear layer that follows it.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


_AFTER_LAYERS = 1 << 30
_LAST = ("decoder.final_layernorm", "mtp.layers.", "output_layer")
AFTER_ALL = (_AFTER_LAYERS + 1, 0)
"""The place of the loss (see `forward_place`)."""


def forward_place(name: str, parameter: torch.nn.Parameter, modules: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return the place of a parameter's use in a forward pass of the whole model: the greater, the later; -1 for the
    embeddings.

    Args:
        name: its global name.
        parameter: the last stage's copy of tied word embeddings counts as used at the end.
        modules: of each layer of the model, its modules in the order of a forward pass (`Layer.modules`).
    """
    if getattr(parameter, "shared", False):
        return _AFTER_LAYERS, len(_LAST)
    found = _LAYER.match(name)
    found = found if found and found[1] else None
    group = int(found.group(1)) if found else -1 if name.startswith("embedding.") else _AFTER_LAYERS
    order = modules[group] if found else _LAST
    return group, max((index for index, part in enumerate(order) if part in name), default=-1)


def global_named_parameters(
    model_chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every parameter of this rank with its global name (see `parts.catalogue`).

    Args:
        model_chunks: this rank's chunks, wrapped (DDP) or not.
    Yields:
        (global name, parameter). The last stage's copy of tied word embeddings has the word embeddings' name, and
        is the only parameter whose name another stage also yields. A parameter that stacks a matrix of several
        experts has their range in its name, `mlp.experts.4:8.linear_fc1.weight`; see `by_expert`.
    """
    for chunk in unwrapped(model_chunks):
        for name, parameter in chunk.named_parameters():
            yield _global_name(chunk, name), parameter


def biases_of_experts(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the biases by which the routers of this rank choose experts, with their global names."""
    for chunk in unwrapped(model_chunks):
        for name, buffer in chunk.named_buffers():
            if name.endswith(".router.expert_bias"):
                yield _global_name(chunk, name), buffer


def unwrapped(model_chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the chunks without the wrappers of data parallelism and 16-bit training."""
    return [_unwrapped(chunk) for chunk in model_chunks]


def _unwrapped(module: Any) -> Any:
    """Return the chunk inside of all wrappers: every wrapper of megatron-core, and of ours, has the attribute `module`,
    and no model has."""
    wrapped = getattr(module, "module", None)
    return _unwrapped(wrapped) if isinstance(wrapped, torch.nn.Module) else module


def by_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the catalogue names: views of the single experts' tensors for a stacked one, else the
    tensor itself.

    Args:
        name: from `global_named_parameters`.
        tensor: the parameter, or another of its shape, such as its gradient.
    """
    found = _EXPERT_RANGE.search(name)
    if found is None:
        yield name, tensor
        return
    experts = range(int(found.group(1)), int(found.group(2)))
    for expert, matrix in zip(experts, tensor, strict=True):
        yield f"{name[: found.start()]}.experts.{expert}.{name[found.end() :]}", matrix


def catalogued(model_chunks: Sequence[torch.nn.Module], config: Config) -> dict[int, Parameter]:
    """Return the catalogue's parameter of each parameter of this rank, by its id(); of a stack of experts, the first
    expert's."""
    known = {parameter.name: parameter for parameter in parameters(config)}
    return {
        id(weight): known[next(by_expert(name, torch.empty(weight.shape, device="meta")))[0]]
        for name, weight in global_named_parameters(model_chunks)
    }


def is_of_an_expert(name: str) -> bool:
    """Return whether a global name, stacked or not, belongs to a routed expert's matrix."""
    return f".{_EXPERTS}" in name


def _global_name(chunk: torch.nn.Module, name: str) -> str:
    if name == OUTPUT_LAYER and chunk.share_embeddings_and_output_weights:
        return WORD_EMBEDDINGS
    found = _LAYER.match(name)
    if found is None:
        return name
    module = found[0].removesuffix(".")
    layer: Any = chunk.get_submodule(module)
    inner = name[found.end() :]
    for fused, separate in _FUSED_NORMS:
        inner = inner.replace(fused, separate)
    if inner.startswith(_EXPERTS):
        experts = layer.mlp.experts.local_experts
        inner = f"{_EXPERTS}{experts.start}:{experts.stop}.{inner.removeprefix(_EXPERTS)}"
    if found[1] is None:  # under the name that megatron-core saves it by
        single = module.endswith("mtp_model_layer")
        return f"{module.replace('mtp_model_layer', 'transformer_layer') if single else module}.{inner}"
    return f"decoder.layers.{layer.layer_number - 1}.{inner}"
