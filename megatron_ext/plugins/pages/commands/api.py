"""Prints the reference of the library, made from its docstrings: one page for each room.

    megatron-ext api                    # the rooms and their modules, a line each
    megatron-ext api python             # the functions of `from megatron_ext import ...`
    megatron-ext api train              # the page of one room, as Markdown
    megatron-ext api --output docs/api  # every page as a file

A page has every public class, function and method with its signature, its docstring and its place in the source.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import megatron_ext
from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.errors import ConfigurationError
from megatron_ext.registry import functions
from megatron_ext.terminal import say

_PACKAGE = Path(megatron_ext.__file__).parent
_BASE = "base"
"""The page of the modules that are in no room."""

_PYTHON = "python"
"""The page of the functions that the package itself gives."""

_Public = ast.ClassDef | ast.FunctionDef


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Print the reference of the library, made from its docstrings.", __doc__)
    parser.add_argument("room", nargs="?", help="the room whose page is printed; without one, the list of them")
    parser.add_argument(
        "--output", "--write", type=Path, metavar="FOLDER", help="write the list and every page there, as Markdown"
    )
    options = parser.parse_args(argv)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        write_output("--output", options.output / "README.md", index())
        for room in (_PYTHON, *rooms()):
            write_output("--output", options.output / f"{room}.md", page(room))
        say(f"wrote {len(rooms()) + 2} files to {options.output}")
    else:
        say(index() if options.room is None else page(options.room), end="")
    return 0


@functools.cache
def rooms() -> dict[str, list[Path]]:
    """Return the modules of each room, and of none under "base"."""
    files: dict[str, list[Path]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        parts = path.relative_to(_PACKAGE).parts
        files.setdefault(parts[0] if len(parts) > 1 else _BASE, []).append(path)
    return dict(sorted(files.items()))


def index() -> str:
    """Return the list of rooms and modules, with the first sentence of each."""
    lines = ["# Reference", "", f"## [{_PYTHON}]({_PYTHON}.md)", ""]
    lines += [f"- `megatron_ext.{name}`: {_first_sentence(node)}" for name, (node, _) in functions_of_package().items()]
    lines.append("")
    for room, paths in rooms().items():
        lines += [f"## [{room}]({room}.md)", ""]
        lines += [f"- `{_module(path)}`: {_first_sentence(_parsed(path))}" for path in paths]
        lines.append("")
    return "\n".join(lines)


def page(room: str) -> str:
    """Return the page of one room.

    Raises:
        ConfigurationError: there is no such room.
    """
    if room == _PYTHON:
        entries = (line for node, where in functions_of_package().values() for line in _entry(node, where))
        return "\n".join(
            ["# python", "", "`from megatron_ext import pretrain` and so on; docs/python.md shows them.", "", *entries]
        )
    if room not in rooms():
        raise ConfigurationError(f"{room} is no room; there are {_PYTHON}, {', '.join(rooms())}")
    lines = [f"# {room}", ""]
    for path in rooms()[room]:
        tree = _parsed(path)
        lines += [f"## {_module(path)}", "", *_docstring(tree)]
        for node in _public(tree):
            lines += _entry(node, f"{path.relative_to(_PACKAGE.parent)}:{node.lineno}")
    return "\n".join(lines)


def functions_of_package() -> dict[str, tuple[ast.FunctionDef, str]]:
    """Return the functions that `from megatron_ext import NAME` gives: name -> its definition, and where it is."""
    found = {}
    for name, place in functions().items():
        module, _, function = place.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        path = Path(spec.origin)
        [node] = [one for one in _parsed(path).body if isinstance(one, ast.FunctionDef) and one.name == function]
        where = path.relative_to(_PACKAGE.parent) if path.is_relative_to(_PACKAGE) else path.name
        found[name] = node, f"{where}:{node.lineno}"
    return found


def _entry(node: _Public, where: str) -> Iterator[str]:
    """Yield the lines of a class or a function, and of the methods of a class."""
    yield from (f"### {node.name}", "", "```python", _signature(node), "```", "", *_docstring(node))
    if isinstance(node, ast.ClassDef):
        for field, text in _fields(node):
            yield f"- `{field}`" + (f": {text}" if text else "")
        yield ""
        for method in _public(node):
            yield from (f"#### {node.name}.{method.name}", "", "```python", _signature(method), "```", "")
            yield from _docstring(method)
    yield from (f"*{where}*", "")


def _signature(node: _Public) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass, or class attributes, each with the string that follows it."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            text = after.value.value if _is_text(after) else ""  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            if not name.startswith("_"):
                yield f"{name}: {ast.unparse(statement.annotation)}", " ".join(str(text).split())


def _is_text(statement: ast.stmt | None) -> bool:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
        return False
    return isinstance(statement.value.value, str)


def _public(node: ast.Module | ast.ClassDef) -> list[_Public]:
    definitions = [child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef)]
    return [child for child in definitions if not child.name.startswith("_")]


def _docstring(node: ast.Module | _Public) -> list[str]:
    text = ast.get_docstring(node)
    return [text, ""] if text else []


def _first_sentence(tree: ast.Module | ast.FunctionDef) -> str:
    text = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return text.removesuffix(":")


def _module(path: Path) -> str:
    parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
