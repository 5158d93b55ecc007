"""Lays pages out in headless Chromium, where it is installed, and says what does not fit."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NONE_HERE = "no Chromium is installed; apt install chromium"

# The page stands in a frame of the width, for a window has a least one. Its own policy forbids scripts; this one is the
# frame's neighbour, and only measures.
_MEASURE = """
const frame = document.querySelector("iframe"), found = {};
frame.onload = () => {
  const page = frame.contentDocument, wide = page.documentElement.clientWidth;
  found.scrolls = page.documentElement.scrollWidth - wide;
  found.height = page.documentElement.scrollHeight;
  const scrolled = each => each.closest(".wide");
  found.cut = [...page.querySelectorAll("h1,h2,p,pre,svg,table")].filter(each => !scrolled(each) &&
    each.getBoundingClientRect().right > wide + 1).map(each => each.outerHTML.slice(0, 80));
  found.overlaps = [];
  for (const drawing of page.querySelectorAll("svg")) {
    const texts = [...drawing.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
    texts.forEach(([one, a], at) => texts.slice(at + 1).forEach(([other, b]) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        found.overlaps.push(one + " / " + other); }));
  }
  found.small = [...page.querySelectorAll("svg text")].filter(each => each.getBoundingClientRect().height < 7).length;
  document.querySelector("pre").textContent = JSON.stringify(found);
};
"""


def measure(page: str, width: int, folder: Path) -> dict[str, Any]:
    """Return what Chromium finds of a page in a window of this width, in pixels.

    Returns:
        `scrolls`, the pixels that it is wider than the window; `height`; `cut`, elements that reach over the edge;
        `overlaps`, pairs of texts of a drawing; `small`, the number of texts that are less than 7 pixels high.
    """
    assert CHROMIUM is not None
    frame = f'<iframe style="width:{width}px;height:3000px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    file = folder / f"frame-{width}.html"
    file.write_text(f"<!DOCTYPE html><body style='margin:0'>{frame}<pre></pre><script>{_MEASURE}</script>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--window-size=1700,3000"]

    def laid_out(more: str) -> str:
        words = [str(CHROMIUM), *options, more, f"file://{file}"]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout

    laid_out(f"--screenshot={folder}/page-{width}.png")
    [text] = re.findall(r"<pre>(\{.*?\})</pre><script>", laid_out("--dump-dom"), re.DOTALL)
    return json.loads(html.unescape(text))
