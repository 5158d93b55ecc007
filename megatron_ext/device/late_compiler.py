"""Leaves torch's compiler out of a process that compiles nothing.

torch.optim imports torch._dynamo, torch's compiler, at the first call of an optimizer's methods, only to tell it that
they are not to be compiled; with SymPy and Triton, which come with it, that is a quarter of the processor time from the
launch to the first step. `delay_compiler` puts a module into its place which answers this itself. Whatever else asks
for the compiler, `torch.compile` first of all, imports it then.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


def delay_compiler(while_importing: Callable[[], AbstractContextManager[None]]) -> None:
    """Put a stand-in into the place of torch._dynamo, unless that is imported already.

    Args:
        while_importing: makes the context in which the compiler is imported, once something needs it.
    """
    if _NAME not in sys.modules:
        stand_in = _LateCompiler(while_importing)
        sys.modules[_NAME] = torch._dynamo = stand_in
        sys.meta_path.insert(0, _Submodules(stand_in))


class _LateCompiler(ModuleType):
    """Answers what torch calls while nothing is compiled; any other attribute is the compiler's own."""

    def __init__(self, while_importing: Callable[[], AbstractContextManager[None]]):
        super().__init__(_NAME)
        self.__spec__ = ModuleSpec(_NAME, None, is_package=True)
        self.__path__ = []  # its submodules are found by `_Submodules` alone
        self._while_importing = while_importing
        self._lock = threading.RLock()
        self._left_alone: list[Any] = []
        self.trace_rules = _LateTraceRules(self)

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function that computes what `fn` does, and that the compiler, once imported, leaves alone."""
        if fn is None or not recursive:
            return self.genuine().disable(fn, recursive, **options)
        if options != {"wrapping": False}:  # as a decorator: torch's own one asks again, as below, when it is called
            function = fn if isinstance(fn, FunctionType) else _as_function(fn)
            return torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]
        # torch keeps this answer in an attribute of the function, which `genuine` removes.
        self._left_alone.append(fn)
        return fn

    def genuine(self) -> ModuleType:
        """Return the compiler, imported at the first call."""
        with self._lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME], torch._dynamo
                with self._while_importing():
                    importlib.import_module(_NAME)
                for function in self._left_alone:
                    vars(function).pop("__dynamo_disable", None)
                self._left_alone.clear()
        return sys.modules[_NAME]

    def __getattr__(self, name: str) -> Any:
        # inspect and pickle ask every module for names such as __file__, and expect that some have none.
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self.genuine(), name)


def _as_function(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, which may have attributes, that calls what may have none, such as a method."""
    return lambda *arguments, **named: called(*arguments, **named)


class _LateTraceRules:
    """Stands for torch._dynamo.trace_rules, whose caches torch clears when ranks meet: there are none."""

    def __init__(self, compiler: _LateCompiler):
        self._compiler = compiler

    def clear_lru_cache(self) -> None:
        """Do nothing: no rule has been read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.genuine().trace_rules, name)


class _Submodules(MetaPathFinder, Loader):
    """Finds submodules of the compiler while the stand-in is in its place: they come with the compiler."""

    def __init__(self, stand_in: _LateCompiler):
        self._stand_in = stand_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how `fullname` is loaded; None where the stand-in has gone, or another package is asked for."""
        if not fullname.startswith(f"{_NAME}.") or sys.modules.get(_NAME) is not self._stand_in:
            return None
        self._stand_in.genuine()
        return ModuleSpec(fullname, self, loader_state=importlib.import_module(fullname).__spec__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which `find_spec` has imported."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is, with the spec that the import of the compiler gave it."""
        module.__spec__ = module.__spec__.loader_state if module.__spec__ is not None else None
