"""Tells a user's own code from ours: in the traceback of an error, and in the modules of a model; and reads the parts
that a script brings to a run.

    error in your loss= (ext.py:4): AttributeError: 'TokenLogits' object has no attribute 'logits'; it has ...

Own code is whatever belongs neither to this package nor to an installed one or to Python.
"""

import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NoReturn

from megatron_ext.errors import ConfigurationError

_PACKAGE = str(Path(__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = {"megatron_ext", "megatron", "torch", "transformer_engine", "apex", *sys.stdlib_module_names}


@dataclass(frozen=True)
class OwnPart:
    """A user's function that a run calls. Its frame in a traceback shows which part of the run was at work."""

    name: str
    """The argument of `pretrain` that brought it in."""
    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


def text_of_own_error(error: BaseException) -> str | None:
    """Return the message about an error of a user's own code; None if its traceback has no such code."""
    part, called, entry, place = None, None, None, None
    first, is_inside = error.__traceback__, False
    walked = first and first.tb_next  # the first frame is of who caught it
    while walked is not None:
        frame = walked.tb_frame
        is_inside = is_inside or frame.f_code.co_filename.startswith(_PACKAGE)
        if frame.f_code is OwnPart.__call__.__code__:
            part, called = f"{frame.f_locals['self'].name}=", frame.f_locals["self"].function
        elif is_inside and _is_own_file(frame.f_code.co_filename):
            entry = entry or _name(frame)
            place = f"{Path(frame.f_code.co_filename).name}:{walked.tb_lineno}"
        walked = walked.tb_next
    if place is None and isinstance(called, FunctionType):  # it was called with other arguments than it takes
        place = f"{Path(called.__code__.co_filename).name}:{called.__code__.co_firstlineno}"
    if place is None:
        return None
    text = " ".join(str(error).split())
    return f"error in your {part or entry} ({place}): {type(error).__name__}: {text}{_names_that_exist(error)}"


def _name(frame: FrameType) -> str:
    """Return the name of the function that a frame runs, of a method with the class."""
    return frame.f_code.co_qualname.rpartition("<locals>.")[2]


def _is_own_file(name: str) -> bool:
    paths = sysconfig.get_paths()
    library = name.startswith(("<", _PACKAGE, paths["stdlib"], paths["platstdlib"]))
    return not library and not any(folder in Path(name).parts for folder in _INSTALLED)


def _names_that_exist(error: BaseException) -> str:
    """Return the names that an object of ours has, where one was asked for another."""
    if not isinstance(error, AttributeError) or error.obj is None:
        return ""
    kind = type(error.obj)
    if not kind.__module__.startswith("megatron_ext."):
        return ""
    own = {*vars(kind), *getattr(kind, "__annotations__", {})}
    return f"; it has {', '.join(sorted(name for name in own if not name.startswith('_')))}"


def own_class(thing: object) -> type | None:
    """Return the class of a thing that is a user's own; None where ours, the engine's or torch's made it."""
    return next((kind for kind in type(thing).__mro__ if kind.__module__.partition(".")[0] not in _LIBRARIES), None)


def place_of(kind: type) -> str:
    """Return where a class is defined, `mine.py:12`, or its module where that has no source."""
    try:
        return f"{Path(inspect.getfile(kind)).name}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return kind.__module__


class _HandedOver(BaseException):
    """Ends a script that is only read, where it would begin to train."""

    def __init__(self, flags: object, own: Mapping[str, Any]):
        super().__init__()
        self.flags, self.own = flags, own


_readers: list[Path] = []
"""The script that is being read, if one is."""


def hand_over(flags: object, own: Mapping[str, Any]) -> None:
    """End the script that calls this, if it is run only to be read; else return at once.

    Args:
        flags: the flags that it trains with.
        own: the parts of the run that it brings in, by their names.
    """
    if _readers:
        raise _HandedOver(flags, own)


def read_script(path: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Run a script as this process's main program up to its call of `start` or `pretrain`; return the flags and the own
    parts that it gives these. Of a script that has settings of its own in the place of its arguments, these follow
    them: the last of two counts.

    Raises:
        ConfigurationError: it gives no flags, or never calls one of them.
    """
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location("__main__", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"--script {path} is no Python file; name the script that calls pretrain or start")
    sys.modules["__main__"] = module = importlib.util.module_from_spec(spec)
    _readers.append(path)
    try:
        spec.loader.exec_module(module)
    except _HandedOver as call:
        if not isinstance(call.flags, Sequence):
            _refuse(path, f"gave pretrain {type(call.flags).__name__}; give it the list of flags")
        flags = [str(flag) for flag in call.flags]
        reads_them = any(flags[at : at + len(arguments)] == [*arguments] for at in range(len(flags)))
        return flags if reads_them else [*flags, *arguments], dict(call.own)
    finally:
        _readers.clear()
    _refuse(path, "ended without a call of pretrain or start; let its main program call one of them")


def _refuse(path: Path, why: str) -> NoReturn:
    raise ConfigurationError(f"--script {path} {why}")
