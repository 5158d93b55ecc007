"""Megatron's own command line, read from the source in the megatron-core wheel by `ast`; nothing of it is imported.

Its options have two origins: `add_argument` calls in `megatron/training/arguments.py`, and dataclasses that the same
file hands to `ArgumentGroupFactory`, which turns each field into an option unless its `exclude` names it.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNREADABLE = "<an expression>"


@dataclass(frozen=True)
class WheelOption:
    """One spelling of one option. `values` is how many it takes: "0", "1", "many"."""

    flag: str
    values: str
    default: Any
    choices: tuple[Any, ...] | None


@functools.cache
def wheel_options() -> dict[str, WheelOption]:
    """Flag -> option, for every option of the wheel."""
    tree = ast.parse((_megatron() / "training/arguments.py").read_text())
    found = {}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                options = _from_call(call)
            elif isinstance(call.func, ast.Name) and call.func.id == "ArgumentGroupFactory":
                options = _from_dataclass(call, function)
            else:
                continue
            found |= {option.flag: option for option in options}
    return found


def _megatron() -> Path:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def _from_call(call: ast.Call) -> Iterator[WheelOption]:
    flags = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    action = ast.unparse(keywords["action"]) if "action" in keywords else ""
    default = _value(keywords.get("default"))
    if "BooleanOptionalAction" in action:
        flags += ["--no-" + str(flag).removeprefix("--") for flag in flags]
    is_switch = "store_true" in action or "store_false" in action or "BooleanOptionalAction" in action
    if is_switch and default is None:
        default = "store_false" in action
    for flag in flags:
        yield WheelOption(
            str(flag), "0" if is_switch else _count(keywords.get("nargs")), default, _choices(keywords.get("choices"))
        )


def _from_dataclass(call: ast.Call, function: ast.FunctionDef) -> Iterator[WheelOption]:
    assert isinstance(call.args[0], ast.Name)
    excluded: list[str] = []
    for keyword in call.keywords:
        node = keyword.value
        if isinstance(node, ast.Name):  # a list bound to a local name above the call
            bound = (
                n for n in ast.walk(function) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == node.id
            )
            node = next(bound).value
        excluded = ast.literal_eval(node)
    for field in _fields(call.args[0].id):
        assert isinstance(field.target, ast.Name)
        if field.target.id not in excluded:
            yield from _from_field(field.target.id, field)


def _from_field(name: str, field: ast.AnnAssign) -> Iterator[WheelOption]:
    annotation = ast.unparse(field.annotation)
    default, meta = _value(field.value), {}
    if isinstance(field.value, ast.Call) and ast.unparse(field.value.func).endswith("field"):
        keywords = {keyword.arg: keyword.value for keyword in field.value.keywords}
        default = _value(keywords.get("default"))
        if "metadata" in keywords:
            meta = _argparse_meta(keywords["metadata"])
    flag = name.replace("_", "-")
    is_switch = annotation in ("bool", "Optional[bool]", "bool | None")
    flags = [f"--no-{flag}", f"--disable-{flag}"] if is_switch and default else [f"--{flag}"]
    flags = meta.get("arg_names", flags)
    default = meta.get("default", default)
    values = "0" if is_switch else "many" if "list[" in annotation.lower() else "1"
    literal = [
        n for n in ast.walk(field.annotation) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "Literal"
    ]
    choices = ast.literal_eval(literal[0].slice) if literal else None
    if isinstance(field.value, ast.Attribute) and ast.unparse(field.value.value) == annotation:
        default, choices = field.value.attr, _members(annotation)
    if literal and not isinstance(choices, tuple):
        choices = (choices,)
    for spelling in flags:
        yield WheelOption(spelling, values, default, choices)


def _argparse_meta(node: ast.expr) -> dict[str, Any]:
    """The literal entries of `metadata={"argparse_meta": {...}}`."""
    assert isinstance(node, ast.Dict)
    for key, value in zip(node.keys, node.values, strict=True):
        if key is not None and ast.literal_eval(key) == "argparse_meta" and isinstance(value, ast.Dict):
            return {ast.literal_eval(k): _value(v) for k, v in zip(value.keys, value.values, strict=True) if k}
    return {}


@functools.cache
def _classes() -> dict[str, ast.ClassDef]:
    files = [*(_megatron() / "training/config").glob("*.py"), _megatron() / "core/model_parallel_config.py"]
    files += [_megatron() / "core/transformer/transformer_config.py"]
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
    return found


def _fields(class_name: str) -> list[ast.AnnAssign]:
    node = _classes().get(class_name) or _search(class_name)
    inherited = [
        field for base in node.bases if ast.unparse(base) in _classes() for field in _fields(ast.unparse(base))
    ]
    own = [
        item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
    ]
    return inherited + [item for item in own if "init=False" not in ast.unparse(item)]


def _search(class_name: str) -> ast.ClassDef:
    """A class that lives elsewhere in the wheel."""
    for file in _megatron().rglob("*.py"):
        text = file.read_text()
        if f"class {class_name}" in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and node.name == class_name:
                    return node
    raise LookupError(class_name)


def _members(enumeration: str) -> tuple[str, ...]:
    """The names that argparse takes for an enumeration."""
    assigned = (item for item in _search(enumeration).body if isinstance(item, ast.Assign))
    return tuple(ast.unparse(item.targets[0]) for item in assigned)


def _count(nargs: ast.expr | None) -> str:
    return "1" if nargs is None else "many"


def _choices(node: ast.expr | None) -> tuple[Any, ...] | None:
    value = _value(node)
    return tuple(value) if isinstance(value, list | tuple) else None


def _value(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return {"2 ** 32": 2**32, "2**32": 2**32}.get(ast.unparse(node), UNREADABLE)
