"""Pages: one module writes markup, and whatever a file, a flag or a name says is text in it."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.plugins.pages.charts import Series, chart, page
from megatron_ext.plugins.pages.loss_curve import RunHistory
from megatron_ext.plugins.pages.markup import Markup, code, document, element, joined, table
from megatron_ext.plugins.pages.run_page import run_page, runs_page
from megatron_ext.plugins.planner.timeline import Block, Lane, Pass, Timeline
from megatron_ext.plugins.planner.timeline_svg import as_page
from tests.support.pages import HOSTILE, elements, texts
from tests.support.syntax import nodes_of, source

ROOT = Path(__file__).parents[3]
WRITTEN_OUT = HOSTILE.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\udcff", "\\udcff")

# An element of HTML or SVG, or an entity. `<s>` is a token, `<name>` a place for one, `<i4` a format of numbers.
_TAGS = (
    "!doctype|html|head|body|meta|title|style|script|link|h[1-6]|p|pre|span|div|i|b|a|img|br|table|tr|td|th|main|section|"
    "svg|path|text|rect|circle|line|g|polyline|ul|ol|li"
)
MARKUP = re.compile(rf"</?(?:{_TAGS})[\s/>]|&(?:lt|gt|amp|quot|nbsp|#\d+|#x[0-9a-f]+);", re.IGNORECASE)
_BEGINNING = re.compile(r"</?[a-z]*$", re.IGNORECASE)  # of one whose name or attributes are put in
NO_MARKUP = {
    "megatron_ext/tokenizer/tokenizer_record.py": "a text that a tokenizer is tried on",
    "megatron_ext/plugins/doctor/network.py": "`export MASTER_ADDR=<a name or ...>`",
}


def markup_in(text: str) -> list[str]:
    """The string constants of a source that hold markup, parts of f-strings too, but for docstrings."""
    nodes = nodes_of(text)
    passed = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    specs = {id(node.format_spec) for node in nodes if isinstance(node, ast.FormattedValue)}
    begun = [
        part.value
        for node in nodes
        if isinstance(node, ast.JoinedStr) and id(node) not in specs
        for part, following in zip(node.values, node.values[1:], strict=False)
        if isinstance(part, ast.Constant)
        and isinstance(part.value, str)
        and isinstance(following, ast.FormattedValue)
        and _BEGINNING.search(part.value)
    ]
    whole = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed
    ]
    return [*begun, *(each for each in whole if MARKUP.search(each))]


def test_nothing_but_one_module_writes_markup() -> None:
    files = [*(ROOT / "megatron_ext").rglob("*.py"), *(ROOT / "tasks").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    found = {str(path.relative_to(ROOT)): markup_in(source(path)) for path in files if path.name != "markup.py"}
    others = {name: texts for name, texts in found.items() if texts and name not in NO_MARKUP}
    assert not others, f"use megatron_ext.plugins.pages.markup.element: {others}"
    makers = [str(path) for path in files if re.search(r"\bMarkup\(", source(path)) and path.name != "markup.py"]
    assert not makers, "only markup.py says of a text that it is markup"


@pytest.mark.parametrize(
    "text", ['"<script>"', '"</p>"', 'f"<{name}>"', 'f"a <rect{x}/>"', '"<br>"', '"&#9472;"', '"&lt;"', '"<SVG x"']
)
def test_a_tag_in_a_string_is_found(text: str) -> None:
    assert markup_in(f"a = {text}")


@pytest.mark.parametrize("text", ['"<s>"', '"</s>"', '"1 < 2"', '"<i4"', 'f"{x:<10}"', 'f"1 < {x}"', '"R&D; x"'])
def test_what_is_no_tag_is_not(text: str) -> None:
    assert not markup_in(f"a = {text}")


def test_texts_are_escaped_and_markup_is_not() -> None:
    inner = element("b", "1 < 2 & \"3\" 'x'", class_='a"b', fill_opacity=0.5)
    assert inner == ('<b class="a&quot;b" fill-opacity="0.5">1 &lt; 2 &amp; &quot;3&quot; &#x27;x&#x27;</b>')
    assert element("p", ["a", [inner, "<"]]) == f"<p>a{inner}&lt;</p>"
    assert (element("path", d="M0"), element("i", "")) == ('<path d="M0"/>', "<i></i>")


def test_what_is_made_of_markup_by_other_means_is_text_again() -> None:
    part = element("b", "x")
    for text in (part + "<i>", f"{part}", part.upper(), "".join([part]), part.replace("x", "<script>")):
        assert not isinstance(text, Markup)
        assert "<" not in joined(text)


def test_a_style_ends_no_style() -> None:
    with pytest.raises(AssertionError):
        document("title", "</style>")


_STEP = {"iteration": 1, "lm_loss": 2.0, "consumed_tokens": 8, "tokens_per_second": 1.0}
_LANE = Lane(HOSTILE, (Pass(True, 0, 0, 0.0, 1.0),), (Block(HOSTILE, 0.0, 0.5),), ((0.0, 1e6),))
_TIMELINE = Timeline(HOSTILE, (_LANE,), 1, 1.0, notes=(HOSTILE,))
_TASKS = [{"iteration": 1, "tasks": {HOSTILE: {"loss": 1.0}}}]
_SAMPLES = [{"iteration": 1, "samples": [{"prompt": HOSTILE, "text": HOSTILE}]}]
PAGES: dict[str, Callable[[], str]] = {
    "title of a run": lambda: run_page(RunHistory([_STEP], []), HOSTILE),
    "task": lambda: run_page(RunHistory([_STEP], [], tasks=_TASKS), "run"),
    "names of runs": lambda: runs_page({HOSTILE: RunHistory([_STEP], []), "b": RunHistory([_STEP], [])}),
    "timeline": lambda: as_page(_TIMELINE, [HOSTILE]),
    "chart": lambda: page(
        HOSTILE,
        [HOSTILE],
        [
            chart(HOSTILE, HOSTILE, [Series([(1, 1.0)], HOSTILE, dotted=True), Series([(1, 1.0)])], along=HOSTILE),
            chart(HOSTILE, HOSTILE, [], along=HOSTILE, doublings=True),
        ],
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_what_others_have_written_is_text_on_every_page(name: str) -> None:
    shown = PAGES[name]()
    assert WRITTEN_OUT in texts(shown)
    assert shown.encode()


def test_samples_are_text_on_the_page() -> None:
    shown = run_page(RunHistory([_STEP], [], samples=_SAMPLES), "run")
    assert WRITTEN_OUT in texts(shown)
    assert shown.count("&gt;&lt;img src=x") >= 2


def test_a_name_is_no_other_class() -> None:
    """The class of a block is its name; a stranger's ends no attribute."""
    found = elements(as_page(_TIMELINE))
    assert [each for each in found if each.get("class", "").startswith("block ")]


def test_a_cell_is_one_cell() -> None:
    head, line, row = table(["a|b", "c"], [["x|y\\|z", "one\ntwo\x1b[2J"]])
    assert (head, line) == ("| a\\|b | c |", "|---|---|")
    assert row == "| x\\|y\\|z | one two\\x1b[2J |"
    assert [len(re.split(r"(?<!\\)\|", each)) for each in (head, row)] == [4, 4]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a", "`a`"),
        ("a`b", "``a`b``"),
        ("`", "`` ` ``"),
        ("a```b``", "```` a```b`` ````"),
        ("a\n<b>", "`a <b>`"),
        ("", "`  `"),
    ],
)
def test_code_ends_where_its_text_does(text: str, shown: str) -> None:
    assert code(text) == shown
