"""tools/compare_runs.py finds the first difference, and none where there is none."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[3] / "tools" / "compare_runs.py"
ROWS = [
    {"iteration": 1, "lm_loss": 5.5, "elapsed_ms": 10.0},
    {"iteration": 2, "lm_loss": float("nan"), "elapsed_ms": 11.0},
]


def compare(folder: Path, second: list[dict]) -> tuple[int, str]:
    for name, rows in (("a.jsonl", ROWS), ("b.jsonl", second)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(TOOL), str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_times_do_not_count(tmp_path: Path) -> None:
    assert compare(tmp_path, [row | {"elapsed_ms": 99.0} for row in ROWS]) == (0, "identical: 2 rows\n")


def test_one_bit_counts(tmp_path: Path) -> None:
    code, said = compare(tmp_path, [ROWS[0] | {"lm_loss": 5.5 + 2**-50}, ROWS[1]])
    assert code == 1
    assert "row 1 (iteration 1): lm_loss is 5.5 and 5.5000000000000" in said


def test_a_missing_row_counts(tmp_path: Path) -> None:
    assert compare(tmp_path, ROWS[:1]) == (1, "2 and 1 rows; equal up to row 1\n")


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path / "no"), str(tmp_path / "no")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 64
    assert "does not exist" in ended.stderr


def test_a_field_of_one_run_alone_counts(tmp_path: Path) -> None:
    for more in ({"grad_norm": 1.0}, {"lm_loss": None}):
        code, said = compare(tmp_path, [ROWS[0], ROWS[1] | more])
        assert (code, said.split(":")[0]) == (1, "row 2 (iteration 2)")
