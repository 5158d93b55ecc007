"""Measures the kernels that torch has for attention over whole sequences, and makes a process use one of them.

    timed = {kernel: seconds(kernel, heads, device) for kernel in KERNELS}
    use(min(timed, key=timed.get))

torch ranks its kernels by rules of its own; which one is fastest differs by GPU and by shape. The names are those of
Megatron's --attention-backend: "flash" (FlashAttention 2, which torch has, or 3 and 4 where their packages are
installed), "fused" (cuDNN's) and "unfused" (scores, softmax and sum one after another).
"""

import contextlib
import importlib.util
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.device.device_protocol import Device

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
    """What one rank's attention is given for one microbatch."""

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
    """Return how long a forward and a backward pass of causal attention take, the median of several; None where the
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
"""What `use` has set."""


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
