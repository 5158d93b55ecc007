"""Where our source touches what megatron-core and torch keep to themselves, read from its syntax.

An access is covered by the table of seams when the table has its dotted path, where the source says it (an import, a
name that an import leads to, an override), or else a name with the same last part (`x._name`).
"""

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.syntax import nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("megatron_ext", "tools", "benchmarks")
_TABLE = "megatron_ext/seams/"
_ENGINE = ("torch", "megatron")
_OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
# Text that looks like a private name and is the end of another word, or a key in a file of the library datasets.
_SUFFIXES = {"_document", "_text_document", "_model_parallel_size", "_data_path", "_token"}
_SUFFIXES |= {"_extra_state"}  # of torch's state dicts, as documented
_SUFFIXES |= {"_data_files", "_indices_data_files", "_indices_files"}
_KEYS_OF_FILES = {
    "megatron_ext/plugins/families/opt.py": "a key of config.json that begins with _",
    "megatron_ext/plugins/families/reading.py": "keys of config.json, some of which begin with _",
    "megatron_ext/plugins/migrate/megatron_bridge.py": "keys of run_config.yaml, which names objects by _target_",
    "megatron_ext/plugins/migrate/olmo_core.py": "the key of config.json by which OLMo-core names a class",
    "megatron_ext/tokenizer/special_tokens.py": "the key of tokenizer_config.json by which transformers marks a token",
}
# What sets attributes whose names are computed, by its own name: on parameters, on our objects, or on the engine as
# another table says.
_SETS_ANY = {
    "adapt": "device/adaptation.py is a table of its own",
    "_originals": "puts what that table replaces back for a moment",
    "TorchFSDP.__init__": "copies the attributes of a parameter to the one that replaces it",
    "WrappedMethods.put_back": "puts back what `wrap` replaced: public methods, and those that the table names",
    "WrappedMethods.wrap": "names are those of the lists in its file; private ones are found there as texts",
    "_optimized": "copies marks of parameters, which the table names",
    "restore": "sets fields of our own state",
    "Model.at_work": "switches public marks of sequence parallelism off and on",
    "set_numbers": "sets fields of our own state",
}
# Settings that torch documents.
_SETTINGS = ("torch.backends.",)


@dataclass(frozen=True)
class Access:
    """A place in the source that touches the engine."""

    place: str
    """file:line"""
    name: str
    """The dotted path, or `.name` where the source does not tell whose it is."""
    text: str

    def is_covered(self, names: Iterable[str]) -> bool:
        """Whether one of the seams with these names covers it."""
        if self.name.startswith("."):
            return any(self.name[1:] in name.split(".") for name in names)
        return any(name == self.name or name.startswith(f"{self.name}.") for name in names)


@dataclass(frozen=True)
class Source:
    """A file of ours."""

    path: str
    """Relative to the root of the repository."""
    code: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return tree_of(self.code)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree."""
        return nodes_of(self.code)

    @functools.cached_property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @functools.cached_property
    def imported(self) -> dict[str, str]:
        """The dotted path of every name that an import makes, wherever it stands in the file."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
        return found

    @functools.cached_property
    def functions(self) -> dict[int, str]:
        """The name of the function that a node stands in, with its class, by the node's id."""
        return {id(node): name for name, node in _by_function(self.tree)}

    def dotted(self, node: ast.expr) -> str | None:
        """The path of a name or attribute that imports lead to."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        return None

    def access(self, node: Any, name: str) -> Access:
        return Access(f"{self.path}:{node.lineno}", name, ast.unparse(node).partition("\n")[0][:100])


@functools.cache
def sources() -> tuple[Source, ...]:
    """All files whose accesses the table must name."""
    paths = [*(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")), ROOT / "pretrain_gpt.py"]
    names = sorted(str(path.relative_to(ROOT)) for path in paths)
    return tuple(Source(name, (ROOT / name).read_text("utf-8")) for name in names if not name.startswith(_TABLE))


def accesses(files: Iterable[Source]) -> Iterator[Access]:
    """All accesses of these files, of which those to our own private names are left out."""
    files = list(files)
    own = {name for file in files for name in _defined(file)}
    fields = {name for file in files for name in _stored(file)}
    classes = {f"{file.module}.{node.name}": (file, node) for file in files for node in _classes(file)}
    for file in files:
        yield from _imports(file)
        yield from _attributes(file, own)
        yield from _texts(file, own)
        yield from _assignments(file, fields)
        for node in _classes(file):
            yield from _overrides(file, node, classes)


def mentioned(files: Iterable[Source]) -> set[str]:
    """Every name and every text of a single word in these files, private or not."""
    words = set()
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                words.add(node.name)
            elif isinstance(node, ast.alias):
                words |= set(node.name.split("."))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                words |= set(_words(node.value))
    return words


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not (name.startswith("__") and name.endswith("__"))


def _words(value: str | bytes) -> list[str]:
    text = value if isinstance(value, str) else value.decode("latin-1")
    return re.findall(r"\w+", text) if isinstance(value, bytes) or re.fullmatch(r"[\w.]+", text) else []


def _is_of_the_engine(path: str) -> bool:
    return path.partition(".")[0] in _ENGINE


def _classes(file: Source) -> Iterator[ast.ClassDef]:
    return (node for node in file.nodes if isinstance(node, ast.ClassDef))


def _defined(file: Source) -> Iterator[str]:
    """Names that our code makes: functions, classes, arguments, variables, and attributes of its own objects."""
    yield from _stored(file)
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def _stored(file: Source) -> Iterator[str]:
    """Variables, fields of our classes, and attributes of their objects."""
    for node in file.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _imports(file: Source) -> Iterator[Access]:
    for node in file.nodes:
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            if _is_of_the_engine(path) and any(map(is_private, path.split("."))):
                yield file.access(node, path)


def _attributes(file: Source, own: set[str]) -> Iterator[Access]:
    for node in file.nodes:
        if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in _OF_NAMED_TUPLES:
            continue
        path = file.dotted(node)
        if path is not None:
            if _is_of_the_engine(path):
                yield file.access(node, path)
        elif node.attr not in own:
            yield file.access(node, f".{node.attr}")


def _texts(file: Source, own: set[str]) -> Iterator[Access]:
    """Private names in texts: of getattr and its like, in tables of paths, in bytes of pickles."""
    if file.path in _KEYS_OF_FILES:
        return
    parts = {id(part) for node in file.nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in file.nodes:
        if not isinstance(node, ast.Constant) or id(node) in parts:
            continue
        if isinstance(node.value, bytes):
            for name in re.findall(r"(?<![A-Za-z0-9_])_[A-Za-z]\w+", node.value.decode("latin-1")):
                yield file.access(node, f".{name}")
        elif isinstance(node.value, str) and re.fullmatch(r"[A-Za-z_][\w.]*", node.value):
            path = node.value
            if "." in path and _is_of_the_engine(path) and any(map(is_private, path.split("."))):
                yield file.access(node, path)
            elif is_private(path) and "." not in path and path not in own | _SUFFIXES:
                yield file.access(node, f".{path}")


def _assignments(file: Source, fields: set[str]) -> Iterator[Access]:
    """What is set on a module or class of the engine, and methods that are replaced on its objects."""
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            path = file.dotted(node)
            if path is not None and _is_of_the_engine(path) and not path.startswith(_SETTINGS):
                yield file.access(node, path)
            elif path is None and node.attr not in fields and node.attr in _methods_of_the_engine():
                yield file.access(node, f".{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            target, name = node.args[:2]
            path = file.dotted(target)
            if isinstance(name, ast.Constant) and path is not None:
                yield file.access(node, f"{path}.{name.value}")
            elif not isinstance(name, ast.Constant) and file.functions[id(node)] not in _SETS_ANY:
                yield file.access(node, f"setattr in {file.functions[id(node)]}")


def _by_function(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(name of the function with its class, node) for every node."""
    for child in ast.iter_child_nodes(node):
        yield name, child
        inner = isinstance(child, ast.FunctionDef | ast.ClassDef)
        yield from _by_function(child, f"{name}.{child.name}".lstrip(".") if inner else name)


def _overrides(
    file: Source, node: ast.ClassDef, classes: Mapping[str, tuple[Source, ast.ClassDef]]
) -> Iterator[Access]:
    """Methods, and attributes of `self`, that a class of the engine has as well, up its order of resolution."""
    engine = [kind for base in _engine_bases(file, node, classes) for kind in base.__mro__]
    if not engine:
        return
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
            found = next((kind for kind in engine if member.name in vars(kind)), None)
            # The public methods of torch's classes are there to be overridden.
            if found is not None and (found.__module__.startswith("megatron.") or is_private(member.name)):
                yield file.access(member, f"{found.__module__}.{found.__qualname__}.{member.name}")
    of_core = [kind for kind in engine if kind.__module__.startswith("megatron.")]
    read = frozenset().union(*map(_read_of_self, of_core))
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Attribute) or not isinstance(inner.ctx, ast.Store):
            continue
        if _is_self(inner.value) and inner.attr in read:
            yield file.access(inner, f".{inner.attr}")


@functools.cache
def _read_of_self(kind: type) -> frozenset[str]:
    """The attributes of `self` that a class of the engine mentions."""
    return frozenset(re.findall(r"\b(?:self\.|getattr\(self, ['\"])(\w+)", inspect.getsource(kind)))


def _engine_bases(file: Source, node: ast.ClassDef, classes: Mapping[str, tuple[Source, ast.ClassDef]]) -> list[type]:
    """The classes of the engine that a class of ours is made from, through others of ours or by itself."""
    found = []
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        path = file.dotted(plain) or f"{file.module}.{ast.unparse(plain)}"
        if path in classes:
            found += _engine_bases(*classes[path], classes)
        elif _is_of_the_engine(path):
            module, _, name = path.rpartition(".")
            found.append(getattr(importlib.import_module(module), name))
    return found


@functools.cache
def _methods_of_the_engine() -> set[str]:
    """Names of methods in the classes of those modules of megatron-core that our own imports load."""
    for path in {path for file in sources() for path in file.imported.values() if path.startswith("megatron.core.")}:
        _import_as_far_as_it_goes(path)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core")]
    kinds = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    own = [kind for kind in kinds if kind.__module__.startswith("megatron.")]
    return {name for kind in own for name, member in vars(kind).items() if inspect.isfunction(member)}


def _import_as_far_as_it_goes(path: str) -> None:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        importlib.import_module(path.rpartition(".")[0])
