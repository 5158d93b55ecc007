"""Writes HTML and SVG. No other file may hold a tag (`tests/plugins/pages/test_markup.py` looks for one), so that the
content of a file or a flag is text on every page.

    element("p", "1 < 2 ", element("b", name), class_="note")     # <p class="note">1 &lt; 2 <b>...</b></p>

Writes tables and code in Markdown, whatever the texts in them are.

    table(["flag", "meaning"], [[code("--a"), "one | other"]])     # | flag | meaning |, |---|---|, ...
"""

import html
import re
from collections.abc import Iterable, Sequence

from megatron_ext.terminal import printable

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Pages have styles of their own and nothing else: no script, no image, no other address."""


class Markup(str):
    """Text that is markup already. Only this module makes it: string operations on it give plain text."""

    __slots__ = ()


type Content = str | Iterable[Content]
"""Texts, which are escaped, and markup, which is not, as deep in lists as they come."""


def joined(*content: Content) -> Markup:
    """Return texts and markup one after another; control characters are written out (`terminal.printable`)."""
    return Markup("".join(_pieces(content)))


def element(name: str, /, *content: Content, **attributes: object) -> Markup:
    """Return an element. Without content it has no end tag; `""` is content.

    Args:
        attributes: by name, with `_` for `-`; one behind the name is left out (`class_`).
    """
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{joined(str(value))}"' for key, value in attributes.items())
    return Markup(f"<{name}{words}>{joined(*content)}</{name}>" if content else f"<{name}{words}/>")


def document(title: str, style: str, *content: Content) -> Markup:
    """Return a whole page.

    Args:
        title: the title in the browser.
        style: rules of style, which hold nothing that others have written.
        content: what it shows.
    """
    assert "<" not in style
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(style)),
    ]
    lines = [element("head", "\n", [[each, "\n"] for each in head]), element("body", "\n", content)]
    return joined(Markup("<!DOCTYPE html>\n"), element("html", "\n", [[each, "\n"] for each in lines], lang="en"), "\n")


def svg_file(title: str, style: str, width: float, height: float, *content: Content) -> Markup:
    """Return a drawing as a file of its own.

    Args:
        title: the text for screen readers.
        style: rules of style, which hold nothing that others have written.
        width: of the drawing, in pixels; its height is the next.
        content: what it shows.
    """
    assert "<" not in style
    box = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    name = {"role": "img", "aria_label": title, "xmlns": "http://www.w3.org/2000/svg"}
    return joined(element("svg", "\n", element("style", Markup(style)), "\n", content, **box, **name), "\n")


def _pieces(content: Content) -> Iterable[str]:
    if isinstance(content, Markup):
        yield content
    elif isinstance(content, str):
        yield html.escape(printable(content))
    else:
        for each in content:
            yield from _pieces(each)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; its cells are Markdown, in which a bar or a new line would end the cell."""
    lines = [_line(head), "|" + "---|" * len(head)]
    return [*lines, *(_line(row) for row in rows)]


def code(text: str) -> str:
    """Return a text as code in a line: nothing in it, not even a backtick, is Markdown or HTML."""
    shown = _on_one_line(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    # A space that stands on both sides is no part of the code.
    room = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{room}{shown}{room}{fence}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", _on_one_line(cell)) for cell in cells) + " |"


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.splitlines()))
