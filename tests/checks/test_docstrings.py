"""Every public docstring is a sentence with a subject, in the field's terms."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.syntax import nodes_of, source, tree_of

ROOT = Path(__file__).parents[2]
ROOMS = ("megatron_ext", "tools")
GUIDES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
# tools/make_docs.py makes these of the program's messages.
LEFT_OUT = ("docs/errors.md", "docs/flags.md")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef

# A text that begins with one of these is a relative clause or a genitive without what it belongs to, unless a comma
# follows, and after it a subject with one of the verbs.
_PHRASES = ("That", "Those", "Of", "By")
_VERBS = re.compile(r"\b(is|are|was|were|has|have|had|does|do|can|cannot|may|must|will|would|takes?|gets?|gives?)\b")
# After one of these there is a verb somewhere, or the text has none. Many nouns look like one: no false alarms.
_PREPOSITIONS = ("With", "Inside", "Within", "Beside", "As", "For", "From", "In", "At")
_LOOKS_LIKE_A_VERB = re.compile(r"\b([a-z]+s|[a-z]+ed|read|write|make|take|get|give|go|hold|keep|lie|run|wait)\b")
# Coinages in place of the field's terms: next to, copy, state-dict mapping, first difference, layer range, snapshot.
_COINAGES = re.compile(r"\b(beside|sweep|sweeps|swept|Arranged|[Pp]arting|Stretch|Taken)\b")
_INVERSIONS = re.compile(r"\b(has|have|needs|need|knows|know|lacks|lack) (it |them )?not(?=[.,;:)]|$)")


class Found(NamedTuple):
    where: str
    node: Documented
    text: str | None


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.?:])\s+(?=[A-Z`(\[])", paragraph)[0]


def ends(sentence: str) -> bool:
    return sentence.endswith((".", "?", ":", '."', ".)"))


def has_no_subject(sentence: str) -> bool:
    """Whether a sentence begins as a phrase does, and has no verb: "Of the layers, for all microbatches in flight."."""
    first, _, rest = sentence.partition(" ")
    if first in _PHRASES:
        return not _VERBS.search(rest.partition(";")[0].partition(", ")[2])
    return first in _PREPOSITIONS and not _VERBS.search(rest) and not _LOOKS_LIKE_A_VERB.search(rest)


def documented(path: Path) -> Iterator[Found]:
    """Every module, class and function of a file that others may use, without what is inside of functions."""
    where = path.relative_to(ROOT).as_posix()
    tree = tree_of(source(path))
    yield Found(where, tree, ast.get_docstring(tree))
    yield from _inside(tree, where)


def _inside(node: ast.Module | ast.ClassDef, where: str) -> Iterator[Found]:
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            name = f"{where}:{child.lineno} {child.name}"
            yield Found(name, child, ast.get_docstring(child))
            if isinstance(child, ast.ClassDef):
                yield from _inside(child, where)


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    """The docstrings of attributes: texts that stand after an assignment."""
    for node in nodes_of(source(path)):
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in zip(node.body, node.body[1:], strict=False):
                match before, after:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                        yield f"{path.relative_to(ROOT)}:{after.lineno}", text


@functools.cache
def files() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@functools.cache
def all_documented() -> list[Found]:
    return [found for path in files() for found in documented(path)]


def is_function(found: Found) -> bool:
    return isinstance(found.node, ast.FunctionDef) and not any(
        "property" in ast.dump(decorator) for decorator in found.node.decorator_list
    )


def test_everything_public_has_a_docstring() -> None:
    """A method may go without one where another class says what methods of its name do: it is that one's protocol."""
    found = all_documented()
    methods = {one.node.name for one in found if isinstance(one.node, ast.FunctionDef) and one.text}
    missing = [
        one.where
        for one in found
        if not one.text and not (isinstance(one.node, ast.FunctionDef) and _is_method(one) and one.node.name in methods)
        if not (isinstance(one.node, ast.Module) and not one.node.body)
    ]
    assert not missing


def _is_method(found: Found) -> bool:
    assert isinstance(found.node, ast.FunctionDef)
    arguments = [*found.node.args.posonlyargs, *found.node.args.args]
    return bool(arguments) and arguments[0].arg in ("self", "cls", "ctx")


def test_the_first_sentence_ends() -> None:
    assert not [one.where for one in all_documented() if one.text and not ends(first_sentence(one.text))]
    assert not ends(first_sentence("Return the layouts\n\nThat fit."))


def test_sentences_have_a_subject() -> None:
    texts = [(one.where, one.text) for one in all_documented() if one.text]
    texts += [found for path in files() for found in attributes(path)]
    assert not [f"{where}: {text}" for where, text in texts if has_no_subject(first_sentence(text))]


def test_functions_say_what_they_do() -> None:
    """ "Return whether ...", not "Whether ..."; "Return what ...", not "What ..."."""
    phrases = re.compile(r"(The|A|An|Whether|What|Why|How|Which|Where|Those|That|Of) ")
    assert not [one.where for one in all_documented() if one.text and is_function(one) and phrases.match(one.text)]


def test_no_coinages() -> None:
    """In docstrings, names of classes and functions, and guides."""
    found = []
    for path in files():
        for node in nodes_of(source(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = getattr(node, "name", "")
                text = ast.get_docstring(node) or ""
                if _COINAGES.search(name) or _COINAGES.search(text) or _INVERSIONS.search(text):
                    found.append(f"{path.relative_to(ROOT)} {name}")
        found += [where for where, text in attributes(path) if _COINAGES.search(text)]
    for guide in (path for pattern in GUIDES for path in sorted(ROOT.glob(pattern))):
        if guide.relative_to(ROOT).as_posix() not in LEFT_OUT:
            lines = enumerate(guide.read_text().splitlines(), 1)
            found += [
                f"{guide.name}:{number}" for number, line in lines if _COINAGES.search(line) or _INVERSIONS.search(line)
            ]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "Those of norms among them.",
        "That fit, the fastest first.",
        "That of the flags; without one, the ids are all there is.",
        "Of the layers, for all microbatches in flight.",
        "In lower case.",
    ],
)
def test_old_sentences_are_found(text: str) -> None:
    assert has_no_subject(first_sentence(text))


@pytest.mark.parametrize(
    "text",
    [
        "Return the layouts that fit in memory, fastest first.",
        "Number of elements of the norm weights among them.",
        "Of two candidates, the simpler one is taken.",
        "With --async-save, a thread writes a copy.",
        "As in Megatron, the last id ends a document.",
        "In the background, a thread writes.",
    ],
)
def test_sentences_pass(text: str) -> None:
    assert not has_no_subject(first_sentence(text))


def test_old_words_are_found() -> None:
    assert _COINAGES.search("`config.json` beside one or several files")
    for text in ("conversion needs it not", "an interface that this machine has not, and its fix"):
        assert _INVERSIONS.search(text)
    for text in ("what has not been written", "it does not need it", "what a run needs and a plan does not"):
        assert not _INVERSIONS.search(text)
