"""Plants one small mistake in a source text: the kinds of mistake that people make in code of this field.

    for mutant in mutants_of(source, "megatron_ext/data/sampler.py"):
        changed = mutant.apply(source)

A mutant keeps the lines of its source, so that a function of the changed text can take the place of the one that a
process has already loaded. Only bodies of functions are changed: what is computed at import is not.
"""

import ast
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One replaced piece of text."""

    path: str
    operator: str
    line: int
    """Of the piece's first character, from 1."""
    column: int
    """In characters, from 0."""
    original: str
    replacement: str

    def apply(self, source: str) -> str:
        """Return the source with the mistake in it.

        Raises:
            ValueError: the source is not the one that the mutant was made of.
        """
        lines = source.splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        if not source.startswith(self.original, start):
            raise ValueError(f"{self.path}:{self.line} does not hold {self.original!r}")
        return source[:start] + self.replacement + source[start + len(self.original) :]


_Change = tuple[str, ast.AST, str]
"""Operator, the node whose text is replaced, and by what."""
_Operator = Callable[["_Text", ast.AST], Iterator[_Change]]

_GROUPS = {
    "tp": "dp", "dp": "tp", "cp": "tp", "pp": "dp", "dp_cp": "dp", "tp_cp": "tp", "tp_dp_cp": "dp_cp", "mp": "tp",
    "ep": "tp", "expt_tp": "tp", "expt_dp": "ep", "tp_ep": "ep", "tp_ep_pp": "ep", "embd": "pp", "pos_embd": "pp",
    "intra_dp_cp": "dp_cp", "inter_dist_opt": "dp_cp",
}  # fmt: skip
_DTYPES = {
    "float64": "float32", "float32": "bfloat16", "bfloat16": "float16", "int64": "int32", "int32": "int16",
    "double": "float", "uint16": "uint8", "uint32": "uint16", "uint64": "uint32",
}  # fmt: skip
_NAMES = {
    "MAX": "MIN", "MIN": "MAX", "SUM": "MAX", "max": "min", "min": "max", "amax": "amin", "amin": "amax",
    "sum": "mean", "mean": "sum", "any": "all", "all": "any", "cos": "sin", "sin": "cos", "floor": "ceil",
    "ceil": "floor", "maximum": "minimum", "minimum": "maximum", "triu": "tril", "tril": "triu", "sorted": "list",
}  # fmt: skip
_STAGES = {
    "is_first_stage": "is_last_stage", "is_last_stage": "is_first_stage", "is_last_rank": "is_first_rank",
    "is_pp_first_stage": "is_pp_last_stage", "is_pp_last_stage": "is_pp_first_stage", "first": "last",
}  # fmt: skip
_AXIS_METHODS = {
    "sum", "mean", "cat", "stack", "chunk", "split", "unsqueeze", "squeeze", "softmax", "logsumexp", "gather",
    "flatten", "unflatten", "transpose", "movedim", "size", "narrow", "index_select", "cumsum", "argmax",
    "repeat_interleave",
}  # fmt: skip
_AXIS_FIRST = {"sum", "mean", "unsqueeze", "squeeze", "softmax", "flatten", "unflatten", "size", "narrow", "cumsum"}
_ORDER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
          ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*"}
_SYNCS = ("sync", "fsync", "sync_file", "flush", "barrier", "synchronize", "wait", "join")


class _Text:
    """A source and its parts by node."""

    def __init__(self, source: str):
        self.lines = source.splitlines(keepends=True)

    def of(self, node: Any) -> str:
        """Return the text of a node."""
        (first, begin), (last, end) = self.start(node), self.end(node)
        if first == last:
            return self.lines[first - 1][begin:end]
        middle = self.lines[first : last - 1]
        return "".join([self.lines[first - 1][begin:], *middle, self.lines[last - 1][:end]])

    def start(self, node: Any) -> tuple[int, int]:
        """Return line (from 1) and column (in characters) of a node's first character."""
        return node.lineno, self._characters(node.lineno, node.col_offset)

    def end(self, node: Any) -> tuple[int, int]:
        """Return line and column after its last one."""
        return node.end_lineno, self._characters(node.end_lineno, node.end_col_offset)

    def _characters(self, line: int, octets: int) -> int:
        return len(self.lines[line - 1].encode()[:octets].decode())


def mutants_of(source: str, path: str) -> list[Mutant]:
    """Return every mutant of a source, in the order of its lines."""
    text, tree = _Text(source), ast.parse(source)
    found: dict[Mutant, None] = {}
    for node in _inside_functions(tree):
        for operator in _OPERATORS:
            for name, target, replacement in operator(text, node):
                line, column = text.start(target)
                mutant = Mutant(path, name, line, column, text.of(target), replacement)
                if mutant.replacement != mutant.original and _compiles(mutant, source):
                    found[mutant] = None
    return sorted(found, key=lambda mutant: (mutant.line, mutant.column, mutant.operator, mutant.replacement))


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` of them, the operators in turn, at most one for each place while there are others."""
    chooser = random.Random(f"{seed}:{mutants[0].path if mutants else ''}")
    by_operator: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_operator[mutant.operator].append(mutant)
    for several in by_operator.values():
        chooser.shuffle(several)
    operators = sorted(by_operator)
    chooser.shuffle(operators)
    turn = [by_operator[name][i] for i in range(len(mutants)) for name in operators if i < len(by_operator[name])]
    lines: set[int] = set()
    first = [mutant for mutant in turn if mutant.line not in lines and not lines.add(mutant.line)]
    rest = [mutant for mutant in turn if mutant not in first]
    return (first + rest)[:count]


def _compiles(mutant: Mutant, source: str) -> bool:
    try:
        compile(mutant.apply(source), mutant.path, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _inside_functions(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Yield the nodes of functions' bodies; neither assertions, nor annotations, nor what an error or a text says.

    `strict` of a zip counts as an assertion: without it nothing changes in a program that is right.
    """
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "args", "type_params", "keywords") and not inside:
            continue
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr):
                continue
            if isinstance(child, ast.Raise):
                if inside:
                    yield child
                continue
            if isinstance(child, ast.arguments):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":  # zip's own assertion
                continue
            now = inside or (name == "body" and isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef))
            if now:
                yield child
            yield from _inside_functions(child, now)


def _conditions(text: _Text, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.BoolOp):
        for kept in node.values if len(node.values) == 2 else ():
            yield "dropped condition", node, f"({text.of(kept)})"
        for dropped in node.values if len(node.values) > 2 else ():
            word = " and " if isinstance(node.op, ast.And) else " or "
            left = word.join(text.of(value) for value in node.values if value is not dropped)
            yield "dropped condition", node, f"({left})"
    tests = []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        if "\n" not in text.of(test):
            if not _has_an_opposite(test):  # which `_orders` gives
                yield "negated condition", test, f"(not ({text.of(test)}))"
            if not isinstance(node, ast.While):
                yield "dropped condition", test, "True"


def _has_an_opposite(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    return isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.Is | ast.IsNot)


def _orders(text: _Text, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right, operation = text.of(node.left), text.of(node.comparators[0]), type(node.ops[0])
        if operation in _ORDER:
            name = "off by one" if operation in (ast.Lt, ast.LtE, ast.Gt, ast.GtE) else "negated condition"
            yield name, node, f"{left} {_ORDER[operation]} {right}"


def _numbers(text: _Text, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", node, str(node.value + 1)
        if node.value >= 1:
            yield "off by one", node, str(node.value - 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "flipped flag", node, str(not node.value)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = text.of(node.left), text.of(node.right)
        if not any(
            isinstance(side, ast.Constant | ast.JoinedStr) and not _is_number(side) for side in (node.left, node.right)
        ):
            yield "wrong arithmetic", node, f"({left} {_ARITHMETIC[type(node.op)]} {right})"


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _names(text: _Text, node: ast.AST) -> Iterator[_Change]:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    if name is None or not isinstance(getattr(node, "ctx", None), ast.Load):
        return
    prefix = f"{text.of(node.value)}." if isinstance(node, ast.Attribute) else ""
    tables = {"wrong dtype": _DTYPES, "sum for mean, min for max": _NAMES, "first for last stage": _STAGES}
    if isinstance(node, ast.Attribute):
        tables |= {"wrong process group": _GROUPS}
    for operator, table in tables.items():
        if name in table and (operator != "first for last stage" or prefix):
            yield operator, node, prefix + table[name]


def _subscripts(text: _Text, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        index = text.of(node.slice)
        other = {"0": "-1", "-1": "0"}.get(index)
        if other is not None:
            yield "first for last", node, f"{text.of(node.value)}[{other}]"


def _calls(text: _Text, node: ast.AST) -> Iterator[_Change]:
    if not isinstance(node, ast.Call) or "\n" in text.of(node):
        return
    arguments = node.args
    if len(arguments) == 2 and not any(isinstance(argument, ast.Starred) for argument in arguments):
        first, second = map(text.of, arguments)
        if not any(isinstance(argument, ast.Constant | ast.JoinedStr) for argument in arguments):
            keywords = "".join(f", {text.of(keyword)}" for keyword in node.keywords)
            yield "swapped arguments", node, f"{text.of(node.func)}({second}, {first}{keywords})"
    for keyword in node.keywords:
        if keyword.arg == "group":
            others = [text.of(value) for value in (*arguments, *node.keywords) if value is not keyword]
            yield "wrong process group", node, f"{text.of(node.func)}({', '.join(others)})"
        if keyword.arg in ("dim", "axis") and (other := _other_axis(text.of(keyword.value))):
            yield "wrong axis", keyword.value, other
    if isinstance(node.func, ast.Attribute) and node.func.attr in _AXIS_METHODS:
        positions = arguments[:1] if node.func.attr in _AXIS_FIRST else arguments
        for argument in positions:
            if other := _other_axis(text.of(argument)):
                yield "wrong axis", argument, other


def _other_axis(text: str) -> str | None:
    return {"0": "1", "1": "0", "2": "1", "3": "2", "-1": "-2", "-2": "-1"}.get(text)


def _statements(text: _Text, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        called = text.of(node.value).split("(")[0].split(".")[-1]
        yield ("omitted fsync or barrier" if called in _SYNCS else "omitted call"), node, f"if 0: {text.of(node)}"
    elif isinstance(node, ast.AugAssign):
        yield "omitted call", node, f"if 0: {text.of(node)}"
        swapped = {ast.Add: "-=", ast.Sub: "+=", ast.Mult: "/=", ast.Div: "*=", ast.BitOr: "&="}.get(type(node.op))
        if swapped:
            yield "wrong arithmetic", node, f"{text.of(node.target)} {swapped} {text.of(node.value)}"
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        yield "omitted call", node, f"if 0: {text.of(node)}"
    elif isinstance(node, ast.Raise):
        yield "omitted refusal", node, f"if 0: {text.of(node)}"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negated condition", node, f"bool({text.of(node.operand)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not _is_number(node.operand):
        yield "wrong arithmetic", node, f"(+{text.of(node.operand)})"


_OPERATORS: tuple[_Operator, ...] = (_conditions, _orders, _numbers, _names, _subscripts, _calls, _statements)
