"""`compare` says how runs differ in settings and results; with --equal it finds their first difference, and none where
there is none."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.commands import compare_runs
from tests.support.pages import elements, texts

TOOL = Path(__file__).resolve().parents[4] / "tools" / "compare_runs.py"
ROWS = [
    {"iteration": 1, "lm_loss": 5.5, "elapsed_ms": 10.0},
    {"iteration": 2, "lm_loss": float("nan"), "elapsed_ms": 11.0},
]


NAN = float("nan")


def compare(folder: Path, second: list[dict]) -> tuple[int, str]:
    for name, rows in (("a.jsonl", ROWS), ("b.jsonl", second)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(TOOL), "--equal", str(folder / "a.jsonl"), str(folder / "b.jsonl")]
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
        compare_runs.main(["--equal", str(file), str(pipe), "--html", str(tmp_path / "both.html")])


def test_a_page_shows_both_runs_and_where_their_losses_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("before", 0.0), ("after", 0.25)):
        rows = [{"iteration": at, "consumed_tokens": 64 * at, "lm_loss": 5.0 + more * (at > 2)} for at in range(1, 6)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--equal", str(tmp_path / "before"), str(tmp_path / "after"), "--html", str(tmp_path / "both.html")]
    assert compare_runs.main(words) == 1
    assert capsys.readouterr().out == "row 3 (iteration 3): lm_loss is 5.0 and 5.25\n"
    page = (tmp_path / "both.html").read_text()
    assert "<span>row 3 (iteration 3): lm_loss is 5.0 and 5.25</span>\n<span>before</span>\n" in page
    assert "<title>iteration 2: 0</title>" in page
    assert "<title>iteration 3: 0.25</title>" in page


def test_a_page_without_a_name_is_made_here_and_no_metrics_file_is_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        write_run(tmp_path / name, {1: 5.0, 2: 4.0}, {2: 4.5})
    assert compare_runs.main(["a", "b", "c", "--html"]) == 0
    assert capsys.readouterr().out.endswith("\npage  compared.html\n")
    assert "Results" in texts(Path("compared.html").read_text())
    with pytest.raises(ConfigurationError, match=r"^--html a/metrics\.jsonl is the name of a metrics file; put --html"):
        compare_runs.main(["--html", "a/metrics.jsonl", "b", "c"])


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(TOOL), "--equal", str(tmp_path / "no"), str(tmp_path / "no")],
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


def write_run(
    folder: Path,
    losses: dict[int, float],
    validation: dict[int, float],
    *,
    milliseconds: float = 1000.0,
    tokens: int = 100,
    settings: str | None = "device: cpu\nlr: 0.1\n",
    **more: Any,
) -> Path:
    """Write a run of logged steps of so many tokens, whose processor works half of the time."""
    rows: list[dict[str, Any]] = [
        {
            "iteration": at,
            "train_iters": 8,
            "consumed_tokens": tokens * at,
            "lm_loss": loss,
            "elapsed_ms": milliseconds,
            "cpu_ms": milliseconds / 2,
            "tokens_per_second": 1000 * tokens / milliseconds,
            "peak_memory_bytes": 2_000_000_000,
            "world_size": 2,
            **more,
        }
        for at, loss in losses.items()
    ]
    rows += [{"iteration": at, "validation_loss": loss} for at, loss in validation.items()]
    rows.sort(key=lambda row: (row["iteration"], "validation_loss" in row))
    (folder / "iter_0000002").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings is not None:
        (folder / "iter_0000002" / "config.yaml").write_text(settings)
    return folder


def told(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The cells of each line of the tables, by the line's name."""
    assert compare_runs.main([*map(str, words)]) == 0
    rows: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, *cells = re.split("  +", line.strip())
        rows[name] = cells
    return rows


def test_runs_are_compared_by_settings_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step has as many tokens, but the second run's takes twice as long; it reaches the first one's best
    validation loss, 4, after two steps of two seconds on two ranks that work half of the time."""
    losses = {at: 5.0 - at / 8 for at in range(1, 9)}
    one = write_run(tmp_path / "adam", losses, {4: 4.5, 8: 4.0})
    lower = {at: loss - 1 for at, loss in losses.items()}
    settings = "device: cpu\nlr: 0.2\noptimizer: muon\nsave: elsewhere\nload: elsewhere\nmuon_nesterov: true\n"
    other = write_run(tmp_path / "muon", lower, {2: 4.0, 8: 3.0}, milliseconds=2000.0, settings=settings)
    page = tmp_path / "compared.html"
    rows = told(one, other, "--html", page, capsys=capsys)
    assert rows["settings that differ"] == ["A", "B"]
    assert rows["--lr"] == ["0.1", "0.2"]
    assert rows["--optimizer"] == ["adam", "muon"]
    assert rows["--muon-nesterov"] == ["false", "true"]
    assert not {"--save", "--load", "--device", "ranks"} & rows.keys()
    assert rows["training loss, last"] == ["4.0000", "3.0000 (-1.0000)"]
    assert rows["training loss, best"] == ["4.0000 at 8", "3.0000 at 8 (-1.0000)"]
    assert rows["validation loss, last"] == ["4.0000", "3.0000 (-1.0000)"]
    assert rows["tokens"] == ["800", "800"]
    assert rows["tokens per second, median"] == ["100", "50 (-50%)"]
    assert rows["CPU seconds to validation loss 4.0000"] == ["8.0", "4.0 (-50%)"]
    assert rows["CPU seconds of all steps"] == ["8", "16 (+100%)"]
    assert rows["peak memory of a rank, GB"] == ["2.000", "2.000"]
    assert not {"restarts", "losses not finite", "training loss at 800 tokens"} & rows.keys()
    drawn = elements(page.read_text())
    tables = [[cell.text for cell in each if cell.text] for each in drawn if each.tag == "tr"]
    assert ["--lr", "0.1", "0.2"] in tables
    assert ["training loss, last", "4.0000", "3.0000 (-1.0000)"] in tables
    assert "Validation loss by iteration" in [each.attrib.get("aria-label") for each in drawn]


def test_runs_of_other_lengths_batches_and_restarts_are_compared_where_they_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second reads twice as much in a step, breaks off, goes on, has a step without a number and no validation."""
    one = write_run(tmp_path / "one", {at: 5.0 - at / 8 for at in range(1, 9)}, {8: 4.0})
    losses = {1: 5.0, 2: math.nan, 3: 4.5, 4: 4.25}
    other = write_run(tmp_path / "other", losses, {}, tokens=150, settings=None, resumed_at=1, cpu_ms=None)
    rows = told(one, other, "--html", tmp_path / "page.html", capsys=capsys)
    assert "settings: fewer than two runs have a config.yaml" in " ".join(rows)
    assert rows["iterations"] == ["8", "4 of 8"]
    assert rows["validation loss, last"] == ["4.0000", "-"]
    assert rows["training loss at 600 tokens"] == ["4.2500", "4.2500 (+0.0000)"]
    assert rows["rank seconds to training loss 4.2500"] == ["12.0", "6.0 (-50%)"]
    assert rows["restarts"] == ["-", "1"]
    assert rows["losses not finite"] == ["-", "1"]
    assert any("by tokens" in name for name in rows)
    assert "by tokens" in (tmp_path / "page.html").read_text()


def test_runs_without_a_finite_loss_and_one_run_twice_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write_run(tmp_path / "bad", {1: math.nan, 2: math.inf}, {})
    rows = told(bad, bad, capsys=capsys)
    assert rows["no setting differs"] == ["A", "B"] or "no setting differs" in rows
    assert rows["losses not finite"] == ["2", "2"]
    assert "no finite loss to show" in rows
    assert not any("loss" in name and "seconds" in name for name in rows)


def test_many_runs_stand_in_tables_below_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [write_run(tmp_path / f"run-{n}", {1: 5.0 - n}, {}, settings=f"lr: 0.{n + 1}\n") for n in range(9)]
    assert compare_runs.main([*map(str, runs)]) == 0
    said = capsys.readouterr().out
    table = said.partition("settings that differ")[2].partition("loss in nats")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert [cell for line in said.splitlines() if line.startswith("--lr") for cell in line.split()[1:]] == [
        f"0.{n + 1}" for n in range(9)
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a"], "give two runs or more to compare; `megatron-ext show a` shows one"),
        (["--equal", "a", "b", "c"], "--equal compares two runs, and 3 are given"),
        (["a", "b"], "a: no such file"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        compare_runs.main(words)
