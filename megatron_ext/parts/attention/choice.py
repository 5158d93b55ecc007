"""Settles which kernel of torch computes attention, once, before the model is built, the same on all ranks.

With --attention-backend auto each kernel is measured on the GPU that trains, with the heads of this rank; rank 0's
fastest is everybody's, since other kernels round differently. A resumed run keeps the kernel of its checkpoint, so that
it goes on with the same bits: the choice is part of the configuration that a checkpoint holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ext.config.derived.attention_flags import kernels_by_name
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.attention.timing import KERNELS, Heads, Kernel, is_installed, seconds
from megatron_ext.parts.stack import layers


@dataclass(frozen=True)
class Choice:
    """The configuration with the kernel that is used, and what the start of the run says of it."""

    config: Config
    text: str | None = None


def choose(config: Config, device: Device, saved: Mapping[str, Any] | None) -> Choice:
    """Choose the kernel among those that the flags allow. Collective, where it is measured.

    Raises:
        ConfigurationError: none of the kernels that the flags ask for is installed, or can run here.
    """
    heads = _heads(config)
    if device.kind != "cuda" or heads is None:
        return Choice(config)
    allowed = allowed_kernels(config)
    kept = _kept(saved or {})
    if kept in allowed and len(allowed) > 1 and _of_rank_0(seconds(kept, heads, device)) is not None:
        return Choice(_with(config, kept), f"{kept}, as in the checkpoint")
    return _fastest(config, allowed, heads, device)


def allowed_kernels(config: Config) -> tuple[Kernel, ...]:
    """Return torch's kernels that --attention-backend and --flash-attention-version leave; all where they say nothing,
    or something to Transformer Engine."""
    if config.model.transformer_impl == "transformer_engine":
        return KERNELS
    backend, version = config.training.attention_backend, config.training.flash_attention_version
    if backend == "unfused":
        return (Kernel("unfused"),)
    if version is not None and backend != "fused":
        return (Kernel("flash", version),)
    return tuple(kernel for kernel in KERNELS if backend in ("auto", "local", kernel.backend))


def _heads(config: Config) -> Heads | None:
    """Return what attention is given; None where there is nothing to choose: kernels that are called by name, and
    Transformer Engine's."""
    model, layout, training = config.model, config.layout, config.training
    if model.transformer_impl == "transformer_engine" or kernels_by_name(config) is not None:
        return None
    shares = layout.tensor_model_parallel_size * layout.context_parallel_size
    of_layer = next((layer.attention for layer in layers(config) if layer.has_attention), None)
    if of_layer is None:
        return None
    return Heads(
        batch=training.micro_batch_size,
        queries=max(1, of_layer.query_heads // shares),
        groups=max(1, of_layer.groups // shares),
        length=model.seq_length,
        channels=max(of_layer.head_size, of_layer.value_head_size),
        dtype=getattr(torch, training.params_dtype),
        dropout=model.attention_dropout,
        deterministic=training.deterministic_mode,
    )


def _kept(saved: Mapping[str, Any]) -> Kernel | None:
    """Return the kernel that the checkpoint was trained with; None where it does not say."""
    backend, version = saved.get("attention_backend"), saved.get("flash_attention_version")
    return next((kernel for kernel in KERNELS if (kernel.backend, kernel.version) == (backend, version or 2)), None)


def _fastest(config: Config, allowed: Sequence[Kernel], heads: Heads, device: Device) -> Choice:
    """Measure the kernels on all ranks, which wait for one another anyway, and take rank 0's fastest."""
    timed = [(taken, kernel) for kernel in allowed if (taken := seconds(kernel, heads, device)) is not None]
    timed = _of_rank_0(sorted(timed, key=lambda pair: pair[0]))
    if not timed:
        if config.training.attention_backend in ("auto", "local") and config.training.flash_attention_version is None:
            return Choice(config, "torch's choice: no fused kernel takes these heads")
        raise ConfigurationError(_none_can(config, allowed, heads, device))
    times = ", ".join(f"{kernel} {1000.0 * taken:.2f} ms" for taken, kernel in timed)
    return Choice(_with(config, timed[0][1]), f"{timed[0][1]}; forward and backward pass of a layer: {times}")


def _of_rank_0[Value](value: Value) -> Value:
    """Return what rank 0 gives. Collective: ranks that each took their own would wait for each other ever after."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def _none_can(config: Config, allowed: Sequence[Kernel], heads: Heads, device: Device) -> str:
    training = config.training
    version = training.flash_attention_version
    flags = f"--attention-backend {training.attention_backend}"
    flags += f" --flash-attention-version {version}" if version is not None else ""
    if not any(map(is_installed, allowed)):
        return f"{flags}: torch finds no package of it here; use --attention-backend auto"
    dtype = str(heads.dtype).removeprefix("torch.")
    return (
        f"{flags}: {device.model_name} cannot run it for {heads.queries} heads of {heads.channels} channels in "
        f"{dtype}, {heads.batch} x {heads.length} tokens; use --attention-backend auto"
    )


def _with(config: Config, kernel: Kernel) -> Config:
    version = kernel.version if kernel.backend == "flash" else None
    training = replace(config.training, attention_backend=kernel.backend, flash_attention_version=version)
    return replace(config, training=training)
