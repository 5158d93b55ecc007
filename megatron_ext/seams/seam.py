"""One seam of the engine, and whether the installed versions still have it as this program relies on it."""

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Seam:
    """A name of the engine that this program relies on."""

    name: str
    """The dotted path: module, class, attribute. `parameter.<mark>` is one that megatron-core sets on parameters."""

    why: str
    """How this program uses the name, and the behavior of the engine that it relies on."""

    parameters: tuple[str, ...] = ()
    """Names of parameters that we pass, or that an override takes: all must be in the signature."""

    called_by: tuple[str, ...] = ()
    """Dotted paths of functions, classes or modules of the engine whose source must mention the attribute."""

    newer: bool = False
    """Whether older versions, which we work with, too, do not have it: its absence is then no problem."""

    @property
    def attribute(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def problems(seam: Seam) -> list[str]:
    """Return the problems of a seam in the installed versions; an empty list if it is as this program expects."""
    return [*_of_the_name(seam), *_of_the_callers(seam)]


def _of_the_name(seam: Seam) -> Iterator[str]:
    if seam.name.startswith("parameter."):
        return
    owner, target = _find(seam.name)
    if target is _MISSING:
        if not seam.newer and not _sets_on_instances(owner, seam.attribute):
            yield "does not exist"
        return
    known = _parameters(target) if seam.parameters else ()
    missing = [name for name in seam.parameters if name not in known]
    if missing:
        yield f"has no parameter {', '.join(missing)}; it has {', '.join(known) or 'none'}"


def _of_the_callers(seam: Seam) -> Iterator[str]:
    for path in seam.called_by:
        # A function may bear the name of the module that it is in, which then hides the module.
        caller = _module(path)
        if caller is _MISSING:
            _, caller = _find(path)
        if caller is _MISSING:
            yield f"was used by {path}, which does not exist"
        elif not re.search(rf"\b{seam.attribute}\b", inspect.getsource(caller)):
            yield f"is not used by {path} any more"


def _find(path: str) -> tuple[Any, Any]:
    """Return the owner and the object at a dotted path; the object is `_MISSING` if it does not exist."""
    parts = path.split(".")
    owner, target = None, importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        owner, target = target, getattr(target, part, _MISSING)
        if target is _MISSING and inspect.ismodule(owner):
            target = _module(".".join(parts[:number]))
        if target is _MISSING:
            # The object found may be a function that hides the module of its name.
            target = getattr(_module(".".join(parts[: number - 1])), part, _MISSING)
        if target is _MISSING:
            return (owner if number == len(parts) else None), _MISSING
    return owner, target


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return _MISSING


def _sets_on_instances(owner: Any, attribute: str) -> bool:
    """Return whether a class has a field of this name, assigns it to `self`, or checks whether it is set on `self`."""
    if not inspect.isclass(owner):
        return False
    if is_dataclass(owner) and attribute in owner.__dataclass_fields__:
        return True
    classes = [kind for kind in owner.__mro__ if kind.__module__.split(".")[0] in ("torch", "megatron")]
    known = (rf"\bself\.{attribute}\b[^=\n]*=[^=]", rf"^\s+{attribute}: ", rf"getattr\(self, ['\"]{attribute}['\"]")
    known += (rf"^\s+self\.{attribute},$",)  # of several at once
    pattern = re.compile("|".join(known), re.MULTILINE)
    return any(pattern.search(inspect.getsource(kind)) for kind in classes)


def _parameters(target: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters, or of an operator's arguments."""
    overload: Any = getattr(target, "default", None)
    if hasattr(overload, "_schema"):
        return tuple(argument.name for argument in overload._schema.arguments)
    return tuple(inspect.signature(target).parameters)
