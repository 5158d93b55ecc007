"""benchmarks/results/parity.md: every layout is in both of its tables, and agreed; docs/parity.md says what it says."""

import re
from pathlib import Path

from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.parity import CURVE_TOLERANCE, GRADIENT_TOLERANCE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "benchmarks/results/parity.md").read_text()


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


def test_the_summary_has_the_numbers_of_the_table() -> None:
    fp32 = rows(PAGE.split("## bf16")[0])
    gradient, curve = max(float(cells[4]) for cells in fp32), max(float(each) for cells in fp32 for each in cells[6:])
    summary = (ROOT / "docs/parity.md").read_text()
    assert f"{len(fp32)} layouts and models" in summary
    for largest in (gradient, curve):
        assert f"| {largest:.1e} |".replace("e-0", "e-") in summary
