"""apex and Transformer Engine, which megatron-core takes kernels from wherever it finds them: here only where asked.

Importing megatron-core next to an installed apex or Transformer Engine swaps Adam, SGD, the gradient norm and clipping
for theirs, without a word and with other rounding. `leave_out` hides packages that were not asked for from imports of
this process, before the engine is imported; `kernels_text` describes the result.

megatron-core wraps small fused functions of its own (dropout with its residual, SwiGLU and others) in torch.compile
when it is imported, and torch compiles each at its first call. On a GPU that needs Triton, which builds its launchers
with a C compiler; without, the first step would fail: `missing_for_kernels`, `leave_uncompiled`.
"""

import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_ext.config.schema import Config

_MODULES = {
    "apex": ("apex", "amp_C", "fused_weight_gradient_mlp_cuda"),
    "transformer_engine": ("transformer_engine", "transformer_engine_torch"),
}
"""Modules that the engine imports from each package."""

_TITLES = {"apex": "apex", "transformer_engine": "Transformer Engine"}

UNUSED_ON_CPU = ("torch.utils.tensorboard", "wandb")
"""Modules that megatron-core imports at its start where it finds them: its timers would write to them, and ours do not.
A GPU's start is left as it is."""

_left_out: list[str] = []
_used: list[str] = []


def asked_for(config: Config) -> tuple[str, ...]:
    """Return the packages whose kernels the flags ask for."""
    packages = {config.model.external_kernels, config.model.transformer_impl} & _MODULES.keys()
    return tuple(sorted(packages))


def leave_out(asked: Iterable[str]) -> None:
    """Hide the packages that are not in `asked` from every import that follows.

    A package that is imported already stays, and the engine takes it.
    """
    for package, modules in _MODULES.items():
        imported = sys.modules.get(package) is not None
        installed = imported or (package not in sys.modules and importlib.util.find_spec(package) is not None)
        if package in asked or imported:
            _used.extend([package] * installed)
            continue
        _left_out.extend([package] * installed)
        # None in the module cache is Python's own way to say that an import of the name must fail.
        sys.modules.update(dict.fromkeys(modules))


def kernels_text() -> str | None:
    """Return a sentence that says which installed packages' kernels are used; None if none is installed."""
    if _used:
        return f"Adam, norm and clipping are {' and '.join(_TITLES[package] for package in _used)}'s, where it has them"
    if not _left_out:
        return None
    titles = " and ".join(_TITLES[package] for package in _left_out)
    takes = " or ".join(f"--external-kernels {package}" for package in _left_out)
    verb = "is" if len(_left_out) == 1 else "are"
    return f"Adam, norm and clipping are torch's; {titles} {verb} installed and not used ({takes} takes it)"


def missing_for_kernels() -> str | None:
    """Return the requirement of compiled GPU kernels that this machine lacks; None if it has all."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's header files are not installed (python3-dev)"
    return None


def leave_uncompiled(without: Iterable[str] = ()) -> None:
    """Import megatron-core with its fused functions uncompiled.

    megatron-core's own switch only acts on modules imported after it, and importing the switch imports most of them.

    Args:
        without: modules that megatron-core can do without, which it does not find meanwhile.
    """
    import torch

    hidden: dict[str, Any] = dict.fromkeys(name for name in without if name not in sys.modules)
    genuine = torch.compile
    torch.compile = _as_it_is
    sys.modules.update(hidden)
    try:
        jit = importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = genuine
        for name in hidden:
            del sys.modules[name]
    jit.disable_jit_fuser()


def _as_it_is(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    return _as_it_is if function is None else function
