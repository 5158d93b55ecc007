"""Finds the plugins and the objects that they bring. The core imports no plugin and names none: it asks this module.

A plugin is a package with a module `plugin.py` that holds `PLUGIN`. It lies in `megatron_ext/plugins/`, or in any
installed distribution whose entry points name it (group `megatron_ext.plugins`, `name = package`). `PLUGIN` says which
commands the plugin adds to `megatron-ext`, which functions to the package, and the objects it brings to the extension
points below, as "module:attribute": the module is imported when the attribute is asked for, so that `--help` loads
neither torch nor a plugin's code.

    for traits in brought("optimizers"):
        ...
"""

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.errors import PluginError

EXTENSION_POINTS = {
    "callbacks": "functions from a run to its callbacks (train/callbacks/standard.py)",
    "choices": "values that a plugin adds to a field of the core (config/schema/option.py)",
    "comparisons": "models with a kind of part, and layouts to compare them in (plugins/prove/cases.py)",
    "checkpoint_formats": "checkpoints that other programs wrote (checkpoint/native/other_formats.py)",
    "counts_as": "functions from values to the fields that count as given next to them (config/parse/options.py)",
    "draws": "functions that draw flags of a kind of part at random (plugins/prove/draws.py)",
    "endings": "functions from the configuration of a run that has come to its planned end (train/pretrain.py)",
    "facts": "functions from typed values to `Facts.brought` (config/resolve.py)",
    "flags": "pairs of a group of the configuration and a dataclass of further fields (config/schema)",
    "importers": "checkpoints of other programs that are converted (plugins/huggingface/importers.py)",
    "initial_weights": "functions that fill a new run's weights (train/pretrain.py)",
    "measures": "functions from a run to callbacks that measure its steps (train/callbacks/reporting.py)",
    "mixers": "kinds of mixers (parts/kinds.py)",
    "families": "families of Hugging Face models (plugins/families/family.py)",
    "newer_states": "states of a run that are kept besides the checkpoints (checkpoint/native/resume.py)",
    "next_tokens": "functions that describe the depths of multi-token prediction (parts/stack.py)",
    "optimizers": "traits of optimizers (config/derived/optimizers.py)",
    "other_flags": "flags of other programs (config/parse/other_flags.py)",
    "product_formats": "how linear layers and experts multiply while they are trained (parts/protocol.py)",
    "preloaded": "modules that the fork server of ranks imports (forkserver/preload.py)",
    "resolvers": "functions that derive what a plugin's flags imply (config/resolve.py)",
    "rules": "rules of validation (rules/validate.py)",
    "saved_flags": "functions from a checkpoint of another program to its flags (checkpoint/native/resume.py)",
    "sinks": "functions from a run to what its metrics are written to (train/callbacks/standard.py)",
    "warnings": "functions from typed values, configuration and facts to warnings (rules/warnings.py)",
    "switches": "pairs of a field that turns on what a plugin does, and its values, None for any (rules/run_rules.py)",
    "ways": "ways of computing a layer, by name (parts/ways.py)",
    "translators": "functions that read a command line of another program (config/parse/command_line.py)",
}
"""Extension points, by name: to each a plugin brings a tuple of objects, which the named file describes."""

_GROUP = "megatron_ext.plugins"
_PAGE = "(docs/own_mixer.md)"


@dataclass(frozen=True)
class Plugin:
    """A plugin: its name, its needs and the objects that it brings."""

    name: str
    needs: tuple[str, ...] = ()
    """Names of the plugins whose code it imports."""

    page: str = ""
    """Path of its page of the documentation, from the root of the distribution's sources."""

    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Command of `megatron-ext` -> its module, which has `main(argv) -> exit code`, and one line of help."""

    functions: Mapping[str, str] = field(default_factory=dict)
    """Function that `from megatron_ext import NAME` gives -> its "module:attribute"."""

    brings: Mapping[str, str | tuple[Any, ...]] = field(default_factory=dict)
    """Extension point -> "module:attribute" of a tuple, or the tuple itself where it takes no import to write it."""


@functools.cache
def plugins() -> dict[str, Plugin]:
    """Return every plugin by name, in the order in which their objects are asked: our own by name, then others by name,
    so that another's is blamed where both bring the same.

    Raises:
        PluginError: a plugin cannot be imported, has the name of another one, needs one that is not installed,
            or brings something to no known point.
    """
    found: dict[str, Plugin] = {}
    for plugin in (*sorted(_of_our_own(), key=_name), *sorted(_of_others(), key=_name)):
        if plugin.name in found:
            raise PluginError(f"two plugins have the name {plugin.name}; rename, or remove, one of them {_PAGE}")
        found[plugin.name] = plugin
    for plugin in found.values():
        lacking = [name for name in plugin.needs if name not in found]
        if lacking:
            raise PluginError(
                f"plugin {plugin.name} needs the plugin {lacking[0]}, which is not installed; install it, or remove "
                f"{plugin.name}"
            )
        unknown = plugin.brings.keys() - EXTENSION_POINTS.keys()
        if unknown:
            raise PluginError(
                f"plugin {plugin.name} brings {', '.join(sorted(unknown))}; the extension points are "
                f"{', '.join(EXTENSION_POINTS)}"
            )
    return found


def brought(point: str) -> tuple[Any, ...]:
    """Return the objects that all plugins bring to an extension point, in the order of the plugins' names, then those
    of the user's own code."""
    assert point in EXTENSION_POINTS, point
    return _brought(point) + _own.get(point, ())


_own: dict[str, tuple[Any, ...]] = {}
"""Extension point -> objects of the user's own code, while it runs."""


@contextmanager
def with_own(point: str, objects: Iterable[Any]) -> Iterator[None]:
    """Return a context in which `brought(point)` has further objects, which an argument of a Python function gave."""
    before = _own.get(point, ())
    _own[point] = (*before, *objects)
    try:
        yield
    finally:
        _own[point] = before


@functools.cache
def _brought(point: str) -> tuple[Any, ...]:
    return tuple(one for plugin in plugins().values() for one in objects_of(plugin, point))


def objects_of(plugin: Plugin, point: str) -> tuple[Any, ...]:
    """Return what a plugin brings to a point.

    Raises:
        PluginError: the plugin is not ours, and what it names cannot be imported, or is no tuple.
    """
    place = plugin.brings.get(point, ())
    if not isinstance(place, str) or _is_ours(place):
        found = load(place) if isinstance(place, str) else place
    else:
        found = _imported(f"plugin {plugin.name} brings {point} {place!r}", lambda: load(place))
    if not isinstance(found, tuple):
        raise PluginError(
            f"plugin {plugin.name} brings {point} that are {type(found).__name__}; bring a tuple of them {_PAGE}"
        )
    return found


def _is_ours(place: str) -> bool:
    return place.startswith(f"{__package__}.")


def _imported(what: str, load_it: Callable[[], Any]) -> Any:
    """Return what a function imports of somebody else's code.

    Raises:
        PluginError: it cannot be imported.
    """
    try:
        return load_it()
    except PluginError:
        raise
    except Exception as error:  # somebody else's code can raise anything
        raise PluginError(
            f"{what}, which cannot be imported: {type(error).__name__}: {error}{_line_of(error)}; mend it, or remove "
            f"its package {_PAGE}"
        ) from error


def _line_of(error: BaseException) -> str:
    """Return the last line of the traceback that is nobody's but the imported code's, ` (mine.py, line 3)`."""
    if isinstance(error, SyntaxError):
        return ""  # its text has the line
    place, walked = "", error.__traceback__
    while walked is not None:
        name = walked.tb_frame.f_code.co_filename
        if not name.startswith(("<", str(Path(__file__).parent))) and Path(name).parent.name != "importlib":
            place = f" ({Path(name).name}, line {walked.tb_lineno})"
        walked = walked.tb_next
    return place


def command_modules() -> dict[str, tuple[str, str]]:
    """Return the commands of all plugins: name -> module and one line of help."""
    return {name: command for plugin in plugins().values() for name, command in plugin.commands.items()}


def functions() -> dict[str, str]:
    """Return the functions that `from megatron_ext import NAME` gives: name -> "module:attribute"."""
    brought_ones = {name: place for plugin in plugins().values() for name, place in plugin.functions.items()}
    return {"pretrain": "megatron_ext.train.from_python:pretrain", **brought_ones}


def load(place: str) -> Any:
    """Return the attribute that "module:attribute" names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _name(plugin: Plugin) -> str:
    return plugin.name


def _of_our_own() -> Iterable[Plugin]:
    folder = Path(__file__).parent / "plugins"
    for package in pkgutil.iter_modules([str(folder)]) if folder.is_dir() else ():
        name = f"{__package__}.plugins.{package.name}.plugin"
        if importlib.util.find_spec(name) is not None:
            yield importlib.import_module(name).PLUGIN


def _of_others() -> Iterable[Plugin]:
    for package in packages_elsewhere():
        what = f"the entry points of an installed package ({_GROUP}) name the plugin {package}"
        plugin = _imported(what, lambda name=package: load(f"{name}.plugin:PLUGIN"))
        if not isinstance(plugin, Plugin):
            raise PluginError(
                f"{package}.plugin has PLUGIN of the type {type(plugin).__name__}; make it a "
                f"megatron_ext.registry.Plugin {_PAGE}"
            )
        yield plugin


@functools.cache
def packages_elsewhere() -> tuple[str, ...]:
    """Return the packages of plugins of other distributions, which their entry points name."""
    # importlib.metadata takes longer to import than the files take to read, and hardly anybody has such a plugin.
    files = (file for place in sys.path for file in Path(place).glob("*.dist-info/entry_points.txt"))
    if not any(f"[{_GROUP}]" in file.read_text(encoding="utf-8", errors="replace") for file in files):
        return ()
    from importlib.metadata import entry_points

    return tuple(sorted({point.value for point in entry_points(group=_GROUP)}))
