"""Sleeps on words of shared memory and wakes who sleeps there, by Linux's futex, for which libc has no function.

Memory order. Ranks talk by aligned words of 64 bits, which the processors that are listed here read and write whole. An
x86 keeps the order of loads and of stores by itself, except for a load after a store; ARM keeps no order. `full_fence`
orders everything before it and everything after it: the kernel's FUTEX_WAKE begins with a full barrier (`smp_mb` in
`futex_hb_waiters_pending`), since it must see a waiter that came before the wake. `fence` does the same where the
processor needs it, and nothing on an x86.
"""

import ctypes
import os
import platform
import sys

# The system call's number, by machine.
_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


class _Seconds(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_MACHINE = platform.machine()
_NUMBER = _NUMBERS.get(_MACHINE, -1)
_ARGUMENTS = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_sleep = ctypes.CDLL(None).syscall  # lets other threads run
_wake = ctypes.PyDLL(None).syscall  # takes a microsecond: keeps the interpreter
_sleep.argtypes = _wake.argtypes = _ARGUMENTS
_SLICE = _Seconds(0, 50_000_000)
_SLICE_ADDRESS = ctypes.addressof(_SLICE)
_nowhere = ctypes.c_uint64()
_NOWHERE = ctypes.addressof(_nowhere)


def is_available() -> bool:
    """Return whether this system has what shared memory needs: futexes whose number is known, and files in memory."""
    return sys.platform == "linux" and _NUMBER > 0 and hasattr(os, "memfd_create") and sys.byteorder == "little"


def sleep(address: int, value: int) -> None:
    """Sleep while the word at `address` has this value, for 0.05 s at most; a signal ends it, too."""
    _sleep(_NUMBER, address, _WAIT, value & 0xFFFFFFFF, _SLICE_ADDRESS)


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`. It is a full fence, too."""
    _wake(_NUMBER, address, _WAKE, _ALL, None)


def full_fence() -> None:
    """Order all loads and stores before this call, and those after it."""
    _wake(_NUMBER, _NOWHERE, _WAKE, 1, None)


def _no_fence() -> None:
    """Do nothing: an x86 keeps this order."""


fence = _no_fence if _MACHINE == "x86_64" else full_fence
"""Orders loads before loads and stores, and stores before stores."""
