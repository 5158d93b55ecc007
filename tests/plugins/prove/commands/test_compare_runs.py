"""tools/compare_runs.py finds the first difference, and none where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.commands import compare_runs

TOOL = Path(__file__).resolve().parents[4] / "tools" / "compare_runs.py"
ROWS = [
    {"iteration": 1, "lm_loss": 5.5, "elapsed_ms": 10.0},
    {"iteration": 2, "lm_loss": float("nan"), "elapsed_ms": 11.0},
]


NAN = float("nan")


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


def test_a_page_of_a_pipe_is_refused(tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file.jsonl"
    os.mkfifo(pipe)
    file.write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ConfigurationError, match=r"^--html reads each metrics file twice, and a pipe .* give a file"):
        compare_runs.main([str(file), str(pipe), "--html", str(tmp_path / "both.html")])


def test_a_page_shows_both_runs_and_where_their_losses_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("before", 0.0), ("after", 0.25)):
        rows = [{"iteration": at, "consumed_tokens": 64 * at, "lm_loss": 5.0 + more * (at > 2)} for at in range(1, 6)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(tmp_path / "before"), str(tmp_path / "after"), "--html", str(tmp_path / "both.html")]
    assert compare_runs.main(words) == 1
    assert capsys.readouterr().out == "row 3 (iteration 3): lm_loss is 5.0 and 5.25\n"
    page = (tmp_path / "both.html").read_text()
    assert "<pre>row 3 (iteration 3): lm_loss is 5.0 and 5.25\nbefore\n" in page
    assert "<title>iteration 2: 0</title>" in page
    assert "<title>iteration 3: 0.25</title>" in page


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path / "no"), str(tmp_path / "no")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 64
    assert "does not exist" in ended.stderr


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([{"iteration": 1, "loss": 2.0}], [{"iteration": 1, "loss": 2.0, "elapsed_ms": 5}], None),
        ([{"iteration": 1, "loss": NAN}], [{"iteration": 1, "loss": NAN}], None),
        ([{"iteration": 1, "loss": NAN}], [{"iteration": 1, "loss": 2.0}], "row 1 (iteration 1): loss is nan and 2.0"),
        ([{"iteration": 4, "loss": 2.0}], [{"iteration": 4, "loss": NAN}], "row 1 (iteration 4): loss is 2.0 and nan"),
        ([{"iteration": 4}], [{"iteration": 4, "loss": 1}], "row 1 (iteration 4): loss is None and 1"),
        ([{"iteration": 4, "loss": 1}], [{"iteration": 4}], "row 1 (iteration 4): loss is 1 and None"),
        ([{"iteration": 4}], [{"iteration": 4}, {"iteration": 5}], "1 and 2 rows; equal up to row 1"),
        ([{"iteration": 4}, {"iteration": 5}], [{"iteration": 4}], "2 and 1 rows; equal up to row 1"),
        (
            [{"iteration": 4}, {"iteration": 5, "z": 1, "a": 1}],
            [{"iteration": 4}, {"iteration": 5, "z": 2, "a": 2}],
            "row 2 (iteration 5): a is 1 and 2",
        ),
    ],
)
def test_the_first_difference_of_two_runs(first: list[Any], second: list[Any], said: str | None) -> None:
    assert compare_runs.first_difference(first, second) == said
