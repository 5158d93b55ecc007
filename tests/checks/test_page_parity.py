"""docs/parity.md: every layout is in both of its tables, and agreed."""

import re
from pathlib import Path

from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.parity import CURVE_TOLERANCE, GRADIENT_TOLERANCE

PAGE = (Path(__file__).resolve().parents[2] / "docs/parity.md").read_text()


def rows(table: str) -> list[list[str]]:
    """Cells by line, without the head; a bar inside of a cell has a backslash before it."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert {len(line) for line in cells} == {len(cells[0])}
    return cells[2:]


def test_every_layout_is_in_both_tables_and_agrees() -> None:
    fp32, bf16 = map(rows, PAGE.split("## bf16"))
    for table in (fp32, bf16):
        assert [cells[0].replace("\\|", "|") for cells in table] == list(CASES)
        assert all(cells[2].startswith("equal") for cells in table)
    assert max(float(cells[4]) for cells in fp32) <= GRADIENT_TOLERANCE
    assert max(float(number) for cells in fp32 for number in cells[6:]) <= CURVE_TOLERANCE
    assert all(float(cells[3]) <= float(cells[4]) for cells in bf16)
