"""Reads the pages that the package writes, as a browser would, and strings that somebody may have written."""

import xml.etree.ElementTree as ElementTree

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&lt;\x1b[2J\x00\udcff |`b`\nrow"
"""What ends an attribute, an element, a cell of a table and a line, and what a terminal obeys."""

_ELEMENTS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "section",
        "h1",
        "h2",
        "pre",
        "p",
        "span",
        "i",
        "details",
        "summary",
        "a",
    ),
    *("svg", "table", "td", "th", "tr", "path", "g", "text", "rect", "circle"),
}


def elements(page: str) -> list[ElementTree.Element]:
    """The elements of a page, which is well-formed, has no script and nothing from elsewhere, and forbids both."""
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    found = list(root.iter())
    assert {each.tag for each in found} <= _ELEMENTS
    names = {name for each in found for name in each.attrib}
    assert not {name for name in names if name.startswith("on") or name in ("src", "action")}
    assert not [each for each in found if ":" in each.get("href", "") or each.get("href", "").startswith("/")]
    assert "url(" not in page
    assert "@import" not in page
    [policy] = [each for each in found if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.attrib["content"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert page.index("Content-Security-Policy") < page.index("<title>")
    return found


def texts(page: str) -> str:
    """All that a reader of a page sees or hears: texts, titles under the pointer, labels."""
    found = elements(page)
    return "\n".join([*(each.text or "" for each in found), *(each.get("aria-label", "") for each in found)])
