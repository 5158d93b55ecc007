"""The syntax of source texts. A process parses each text once, however many tests look at it: the package takes a
second of computing to parse, a hundred megabytes to keep, and some ten tests look at all of it."""

import ast
import functools
import gc
from pathlib import Path


@functools.cache
def tree_of(text: str) -> ast.Module:
    """Return the syntax tree of a text, which nobody may change."""
    tree = ast.parse(text)
    gc.freeze()  # it stays: each later collection would look through its nodes
    return tree


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree, in the order of `ast.walk`."""
    return tuple(ast.walk(tree_of(text)))


@functools.cache
def source(path: Path) -> str:
    """Return the text of a source file."""
    return path.read_text(encoding="utf-8")
