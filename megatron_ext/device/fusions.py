"""megatron-core's small fused functions (dropout with its residual, SwiGLU and others) need a compiler on a GPU.

megatron-core wraps them in torch.compile when it is imported, and torch compiles each at its first call. On a GPU that
needs Triton, which builds its launchers with a C compiler; without, the first step would fail.
"""

import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def missing_for_kernels() -> str | None:
    """Return what a compiled GPU kernel needs and this machine does not have; None where nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header files are not installed (python3-dev)"
    return None


def leave_uncompiled() -> None:
    """Import megatron-core with its fused functions as the plain ones that they are made of.

    Its own switch acts on what is imported later alone, and importing it imports most of them.
    """
    genuine = torch.compile
    torch.compile = _as_it_is
    try:
        jit = importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = genuine
    jit.disable_jit_fuser()


def _as_it_is(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    return _as_it_is if function is None else function
