"""Has glibc keep the memory that a CPU process frees, for what it allocates next.

A training step frees in its backward pass what its forward pass has allocated, and the next step allocates it again.
glibc gives large blocks back to the system meanwhile, which hands them out zeroed, page by page, each at the price of
a fault: on a CPU that is several percent of a small model's step (docs/decisions.md).
"""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt`'s settings (malloc.h)."""

_KEPT = 1 << 30
"""Bytes that stay with the process although nothing uses them."""

_ON_THE_HEAP = 32 << 20
"""Bytes of the largest block that is kept; glibc takes no higher value on 64 bits."""

_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Set glibc's allocator so, unless the environment sets it; return whether that was done."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OF_THE_USER):
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_TRIM_THRESHOLD, _KEPT) and libc.mallopt(_MMAP_THRESHOLD, _ON_THE_HEAP))
