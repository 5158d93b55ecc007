"""docs/huggingface.md has a row for each family, made of the docstring of its file (`tools/make_docs.py`)."""

from pathlib import Path

from megatron_ext.plugins.families.registry import FAMILIES
from tests.support.families_page import families_table, with_families_table

PAGE = Path(__file__).resolve().parents[2] / "docs/huggingface.md"


def test_the_table_is_made_from_the_families() -> None:
    page = PAGE.read_text()
    assert with_families_table(page) == page, "python tools/make_docs.py writes it anew"
    assert page.count(families_table()) == 1


def test_a_type_is_of_one_family() -> None:
    names = [name for family in FAMILIES.values() for name in (family.model_type, *family.other_names)]
    assert len(names) == len({*names})


def test_every_family_says_its_models_and_notes() -> None:
    rows = [line.split(" | ") for line in families_table().splitlines()[2:]]
    assert [cells[0].removeprefix("| ").split(", ")[0] for cells in rows] == list(FAMILIES)
    assert all(len(cells) == 3 and cells[1] and len(cells[2].split()) > 1 for cells in rows)
