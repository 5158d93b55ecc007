"""The pictures of docs/parallelism.md: those that the tool draws, with a text for readers who do not see them."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools import draw_techniques
from tools.draw_techniques import RANKS, TECHNIQUES, sentence

DOCS = Path(__file__).resolve().parents[3] / "docs"
_CHARACTER = 6.4  # pixels, of a text of 12 pixels


def test_the_pictures_in_docs_are_those_of_the_tool_and_stand_on_the_page(tmp_path: Path) -> None:
    assert draw_techniques.main([str(tmp_path)]) == 0
    page = (DOCS / "parallelism.md").read_text()
    assert len(TECHNIQUES) == len(list(tmp_path.iterdir())) == 6
    for name, technique in TECHNIQUES.items():
        file = f"{name}_parallel.svg"
        assert (DOCS / "images" / file).read_text() == (tmp_path / file).read_text(), "python tools/draw_techniques.py"
        assert f"![{sentence(technique)}](images/{file})" in page


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_ranks_have_all_of_it_together_and_no_text_is_cut(name: str, tmp_path: Path) -> None:
    draw_techniques.main([str(tmp_path)])
    drawing = ElementTree.fromstring((tmp_path / f"{name}_parallel.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    boxes = [each for each in drawing.iter(f"{space}rect") if each.get("class") in ("part", "whole")]
    covered: dict[str, float] = dict.fromkeys(("part", "whole"), 0.0)
    for box in boxes:
        covered[box.attrib["class"]] += float(box.attrib["width"])
    rows = len(TECHNIQUES[name].parts), len(TECHNIQUES[name].parts) + len(TECHNIQUES[name].wholes)
    assert covered["part"] * rows[1] * RANKS == pytest.approx(covered["whole"] * rows[0])
    for text in drawing.iter(f"{space}text"):
        x, length = float(text.attrib["x"]), _CHARACTER * len(text.text or "")
        begin = x - length * {"end": 1.0, "middle": 0.5}.get(text.get("text-anchor", "start"), 0.0)
        assert begin >= 0, text.text
        assert begin + length <= float(drawing.attrib["width"]), text.text
