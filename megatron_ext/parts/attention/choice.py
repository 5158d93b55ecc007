"""Settles which kernel of torch computes attention over whole sequences, once, before the model is built, the same on
all ranks.

    timed = {kernel: seconds(kernel, heads, device) for kernel in KERNELS}
    use(min(timed, key=timed.get))

torch ranks its kernels by rules of its own; which one is fastest differs by GPU and by shape. The names come from
Megatron's --attention-backend: "flash" (FlashAttention 2, which torch has, or 3 and 4 where their packages are
installed), "fused" (cuDNN's) and "unfused" (scores, softmax and sum one after another).

With --attention-backend auto each kernel is measured on the GPU that trains, with the heads of this rank; rank 0's
fastest is everybody's, since other kernels round differently. A resumed run keeps the kernel of its checkpoint, so that
it goes on with the same bits: the choice is part of the configuration that a checkpoint holds.
"""

import contextlib
import importlib.util
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.config.derived.attention_flags import kernels_by_name
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.stack import layers

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
}
_PACKAGES = {3: "flash_attn_interface", 4: "flash_attn.cute"}
"""Packages of FlashAttention, by version."""

_WARM_CALLS, _TIMED_CALLS = 3, 10


@dataclass(frozen=True)
class Kernel:
    """One of the kernels, as --attention-backend and --flash-attention-version name it."""

    backend: str
    version: int = 2
    """Version of FlashAttention."""

    def __str__(self) -> str:
        return f"flash {self.version}" if self.backend == "flash" else self.backend


KERNELS = (Kernel("fused"), Kernel("flash"), Kernel("flash", 3), Kernel("flash", 4))
"""The kernels that compete; the written-out one never wins where one of these can run."""


@dataclass(frozen=True)
class Heads:
    """Shapes and settings of one rank's attention for one microbatch."""

    batch: int
    queries: int
    """Query heads."""

    groups: int
    """Key and value heads."""

    length: int
    """Tokens of a sequence."""

    channels: int
    """Channels of a head."""

    dtype: torch.dtype
    dropout: float = 0.0
    deterministic: bool = False
    """Whether only kernels count whose result does not vary from run to run."""


def is_installed(kernel: Kernel) -> bool:
    """Return whether torch and the kernel's package know each other."""
    package = _PACKAGES.get(kernel.version)
    if kernel.backend != "flash" or package is None:
        return True
    known = getattr(attention, "list_flash_attention_impls", list)()
    return f"FA{kernel.version}" in known and _is_found(package)


def seconds(kernel: Kernel, heads: Heads, device: Device) -> float | None:
    """Return the seconds of a forward and a backward pass of causal attention, the median of several; None where the
    kernel cannot run, because of the device, the shape, the type or its memory."""
    if not is_installed(kernel):
        return None
    try:
        with _version(kernel), sdpa_kernel(_BACKENDS[kernel.backend]), _determinism(heads.deterministic):
            return _measured(heads, device)
    # torch says it in the first two, a kernel's own package in whatever it likes.
    except Exception:
        return None


def use(kernel: Kernel | None, device: Device) -> None:
    """Have attention over whole sequences use `kernel` in this process from now on; None leaves it to torch.

    What the kernel cannot do, such as a mask, torch's others still do, except after "unfused". A CPU has one fused
    kernel, which it keeps.
    """
    _held.close()
    if kernel is None or (device.kind == "cpu" and kernel.backend != "unfused"):
        return
    chosen = _BACKENDS[kernel.backend]
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    _held.enter_context(_version(kernel))
    _held.enter_context(sdpa_kernel([chosen, *others] if chosen != SDPBackend.MATH else [chosen], set_priority=True))


_held = contextlib.ExitStack()
"""Cleanups of the settings of torch that `use` has made."""


def _is_found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # of its parent
        return False


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def _version(kernel: Kernel) -> Iterator[None]:
    """Put the kernels of another version of FlashAttention in the place of torch's own."""
    if kernel.backend != "flash" or kernel.version not in _PACKAGES:
        yield
        return
    attention.activate_flash_attention_impl(f"FA{kernel.version}")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def _measured(heads: Heads, device: Device) -> float:
    def tensor(number: int) -> torch.Tensor:
        shape = (heads.batch, number, heads.length, heads.channels)
        return torch.ones(shape, dtype=heads.dtype, device=device.torch_device)

    query, key, value = (tensor(number).requires_grad_() for number in (heads.queries, heads.groups, heads.groups))
    gradient = tensor(heads.queries)
    marks = []
    for _ in range(_WARM_CALLS + _TIMED_CALLS):
        begun = device.mark()
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=heads.dropout, is_causal=True, enable_gqa=heads.queries != heads.groups
        )
        torch.autograd.grad(out, (query, key, value), gradient)
        marks.append((begun, device.mark()))
    device.synchronize()
    return statistics.median(device.seconds_between(*pair) for pair in marks[_WARM_CALLS:])


@dataclass(frozen=True)
class Choice:
    """The configuration with the kernel that is used, and the text about it at the start of the run."""

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
    """Return the shapes and settings of this rank's attention; None where there is nothing to choose: kernels that are
    called by name, and Transformer Engine's."""
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
    """Return rank 0's value. Collective: ranks that each took their own value would wait for each other for ever."""
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
