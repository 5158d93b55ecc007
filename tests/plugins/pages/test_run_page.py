"""A run's history as text and as a page, from a real metrics file."""

import html
import itertools
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parts.experts.load_report import LayerLoad, load_report
from megatron_ext.plugins.pages.commands import show_run
from megatron_ext.plugins.pages.loss_curve import RunHistory, loss_chart, read_history, summary
from megatron_ext.plugins.pages.run_page import run_page, runs_page
from megatron_ext.plugins.prove.commands import compare_runs
from megatron_ext.telemetry.commands_file import Start
from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.telemetry.metrics_file import MetricsFile
from tests.support.pages import HOSTILE, elements
from tests.support.samples import step
from tests.support.small_models import LLAMA, small_config

TOOL = Path(__file__).parents[3] / "tools" / "show_run.py"


def write_run(folder: Path, losses: dict[int, float], validation: dict[int, float]) -> RunHistory:
    with MetricsFile(folder / "metrics.jsonl", 0) as file:
        for iteration, loss in losses.items():
            file.write(step(iteration=iteration, lm_loss=loss, grad_norm=None if iteration == 1 else 1.0))
        for iteration, loss in validation.items():
            file.write(ValidationMetrics(iteration=iteration, consumed_samples=1, validation_loss=loss))
    return read_history(folder)


def svgs(page: str) -> list[ElementTree.Element]:
    """The charts, which are well-formed XML."""
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in page.split("<svg")[1:]]


def texts_of_head(page: str) -> list[str]:
    """The lines under the heading."""
    head = page.partition("<pre>")[2].partition("</pre>")[0]
    return [html.unescape(line) for line in re.findall("<span>(.*?)</span>", head)]


def lines(chart: ElementTree.Element) -> list[str]:
    return [path.attrib["d"] for path in chart.iter("path") if path.attrib["class"].startswith("line")]


def test_the_chart_is_the_drawn_one(tmp_path: Path):
    history = write_run(tmp_path, {1: 9.0, 2: 7.0, 3: 6.0, 4: 5.0, 5: 5.0, 6: 5.0}, {4: 6.0, 6: 5.0})
    assert loss_chart(history, width=6, height=5) == (
        "      loss in nats per token (. training, o validation)\n"
        "9.00 |.\n"
        "     |\n"
        "7.00 | .\n"
        "     |  .o\n"
        "5.00 |   ..o\n"
        "     +------\n"
        "      1    6"
    )


def test_many_points_share_a_column_by_their_mean(tmp_path: Path):
    history = write_run(tmp_path, {i: float(i % 2) for i in range(1, 1001)}, {})
    plot = [line for line in loss_chart(history, width=10, height=3).split("\n") if "|" in line]
    assert plot[0].startswith("0.5")
    assert sum(line.count(".") - line.startswith("0.") for line in plot) == 10


def test_summary(tmp_path: Path):
    history = write_run(tmp_path, {1: 9.0, 2: math.nan, 3: 5.0}, {3: 2.0})
    assert summary(history) == [
        "training loss    9.0000 at iteration 1 -> 5.0000 at iteration 3",
        "validation loss  2.0000 at iteration 3 -> 2.0000 at iteration 3, perplexity 7.39",
        "tokens           10,240, at 3,278 per second (median)",
        "not finite       1 losses, left out of the curve",
    ]


def of_rows(*rows: dict[str, Any]) -> RunHistory:
    plain = {"lm_loss": 2.0, "consumed_tokens": 0}
    return RunHistory(steps=[plain | row | {"iteration": number} for number, row in enumerate(rows, 1)], evaluations=[])


def test_a_value_of_zero_is_one() -> None:
    history = of_rows({"grad_norm": 0.0}, {"grad_norm": None}, {}, {"grad_norm": 2.0})
    assert history.points("grad_norm") == [(1, 0.0), (4, 2.0)]


def test_slow_ranks_are_named_with_the_rows_in_which_they_were() -> None:
    found = [
        {"rank": rank, "ratio": ratio, "slow": slow}
        for rank, ratio, slow in ((3, 1.5, [3, 1]), (2, 1.0, []), (3, 1.25, [3]))
    ]
    history = of_rows(*({"slowest_rank": each} for each in (found[0], None, found[1], found[2])), {})
    assert history.slowness_points == [(1, 1.5), (3, 1.0), (4, 1.25)]
    assert history.slow_ranks == {3: [1, 4], 1: [1]}
    assert summary(history)[1:] == [
        "slow rank        1, in 1 rows from iteration 1 to 1",
        "slow rank        3, in 2 rows from iteration 1 to 4",
    ]
    assert "Slowest rank by iteration" in run_page(history, "run")
    assert "Slowest rank by iteration" in run_page(of_rows({"slowest_rank": found[1]}), "run"), "nobody need be slow"
    assert "Slowest rank" not in run_page(of_rows({"slowest_rank": None}), "run")


@pytest.mark.parametrize(
    ("rates", "median"), [([5.0], 5), ([1.0, 7.0], 7), ([1000.0, 3.0, 5.0], 5), ([1000.0, 1.0, 9.0, 2.0], 2)]
)
def test_the_rate_is_the_median_without_the_first_step(rates: list[float], median: int) -> None:
    history = of_rows(*({"tokens_per_second": rate, "consumed_tokens": 1000 * n} for n, rate in enumerate(rates, 1)))
    assert f"tokens           {len(rates)},000, at {median} per second (median)" in summary(history)


@pytest.mark.parametrize(("loss", "text"), [(10.0, "22026.47"), (20.0, "exp(20.0)"), (0.0, "1.00")])
def test_large_perplexities_are_written_short(loss: float, text: str) -> None:
    rows = [{"iteration": 1, "validation_loss": loss}]
    assert summary(RunHistory([], rows)) == [
        f"validation loss  {loss:.4f} at iteration 1 -> {loss:.4f} at iteration 1, perplexity {text}"
    ]


def test_what_is_not_finite_is_counted_of_both_losses() -> None:
    bad = RunHistory(
        steps=[{"iteration": 1, "lm_loss": math.nan}, {"iteration": 2, "lm_loss": 1.0}],
        evaluations=[{"iteration": 2, "validation_loss": math.inf}, {"iteration": 4, "validation_loss": math.nan}],
    )
    assert "not finite       3 losses, left out of the curve" in summary(bad)


def test_each_row_is_of_one_kind(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "steps": {"lm_loss": 1.5, "consumed_tokens": 8},
        "evaluations": {"validation_loss": 1.5},
        "tasks": {"tasks": {"cloze": {"loss": 1.5}}},
        "samples": {"samples": [{"prompt": "a", "text": "b"}]},
        "others": {"other": None},
    }
    written = {kind: {"iteration": number, **row} for number, (kind, row) in enumerate(rows.items())}
    write_rows(tmp_path / "mine.jsonl", *written.values())
    history = read_history(tmp_path / "mine.jsonl")
    del written["others"]
    assert {kind: getattr(history, kind) for kind in written} == {kind: [row] for kind, row in written.items()}


def test_a_task_is_drawn_by_its_accuracy_or_else_its_loss() -> None:
    found: list[dict[str, Any]] = [
        {
            "iteration": at,
            "tasks": {"cloze": {"loss": 9.0, "accuracy": at / 10}, "text": {"loss": 4.0 - at}, "odd": {"x": 1}},
        }
        for at in (1, 2)
    ]
    page = run_page(RunHistory([{"iteration": 1, "lm_loss": 1.0}], [], tasks=found), "run")
    drawn = {chart.attrib["aria-label"]: [title.text for title in chart.iter("title")] for chart in svgs(page)}
    assert drawn["Task cloze by iteration"] == ["iteration 1: 0.1", "iteration 2: 0.2"]
    assert drawn["Task text by iteration"] == ["iteration 1: 3", "iteration 2: 2"]
    assert "Task odd" not in page
    assert "<h2>Task cloze <span>accuracy</span>" in page


@pytest.mark.parametrize(
    ("number", "shown"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 3]), (9, [0, 4, 8])]
)
def test_samples_of_the_first_the_middle_and_the_last_time_are_shown(number: int, shown: list[int]) -> None:
    rows = [{"iteration": at, "samples": [{"prompt": "a<", "text": f"b{at}"}]} for at in range(number)]
    page = run_page(RunHistory([{"iteration": 1, "lm_loss": 1.0}], [], samples=rows), "run")
    lines = [line for line in page.partition("<h2>Samples</h2>")[2].splitlines() if "iteration" in line]
    assert [html.unescape(re.sub("<[^>]*>", "|", line)) for line in lines] == [
        f"|iteration {at}|||a<|b{at}|" for at in shown
    ]


def test_each_run_of_many_has_its_colour_and_the_ninth_that_of_the_first() -> None:
    """Okabe and Ito's colours and two more."""
    runs = {f"run {number}": of_rows({"lm_loss": float(number)}) for number in range(10)}
    page = runs_page(runs)
    colours = re.findall(r"\.run(\d+) \{ stroke: (#\w+); color: (#\w+); \}", page)
    assert [int(number) for number, _, _ in colours] == list(range(10))
    assert all(line == key for _, line, key in colours)
    assert len({line for _, line, _ in colours}) == 8
    assert [colours[number][1] for number in (8, 9)] == [colours[number][1] for number in (0, 1)]
    classes = [path.attrib["class"] for path in svgs(page)[0].iter("path") if "line" in path.attrib["class"]]
    assert classes == [f"line run{number}" for number in range(10)]
    assert texts_of_head(page)[:2] == [
        "run 0",
        "    training loss    0.0000 at iteration 1 \u2192 0.0000 at iteration 1",
    ]


def test_the_page_is_complete_in_itself_and_well_formed(tmp_path: Path):
    page = run_page(write_run(tmp_path, {1: 9.0, 2: 7.0, 3: 5.0}, {3: 6.0}), "<runs & more>")
    assert elements(page)
    assert "http:" not in page
    assert "https:" not in page
    assert "<h1>&lt;runs &amp; more&gt;</h1>" in page
    assert [chart.attrib["aria-label"] for chart in svgs(page)] == [
        "Loss by iteration",
        "Learning rate by iteration",
        "Gradient norm by iteration",
        "Speed by iteration",
        "Memory by iteration",
    ]


def test_lines_run_through_the_data_and_break_at_nan(tmp_path: Path):
    losses = {1: 2.0, 2: 4.0, 3: math.nan, 4: 3.0, 5: 2.0}
    loss, _, norm, *_ = svgs(run_page(write_run(tmp_path, losses, {2: 3.0, 4: 2.5}), "run"))
    train, validation = lines(loss)
    # x from 64 to 532 over 4 iterations; y from 230 (1.9, a twentieth below the lowest) up to 12 (4.1).
    assert train == "M64.0 220.1L181.0 21.9M415.0 121.0L532.0 220.1"
    assert validation == "M181.0 121.0L415.0 170.5"
    assert lines(norm)[0].count("L") == 3, "the step without a norm is left out"
    titles = [title.text for title in loss.iter("title")]
    assert "iteration 2: 4" in titles
    assert "iteration 4: validation 2.5" in titles


def test_a_long_run_keeps_its_spikes(tmp_path: Path):
    losses = dict.fromkeys(range(1, 20001), 2.0) | {12_345: 9.0}
    page = run_page(write_run(tmp_path, losses, {}), "run")
    assert len(page) < 400_000
    assert "iteration 12345: 9<" in page


def test_a_run_with_nothing_finite_is_said_to_be_so(tmp_path: Path):
    history = write_run(tmp_path, {1: math.nan}, {})
    assert loss_chart(history) == "no finite loss to show"
    assert "Nothing to show." in run_page(history, "run")


def test_a_missing_or_empty_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl: no such file.*--metrics-file"):
        read_history(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigurationError, match="no row yet"):
        read_history(tmp_path)


def test_the_tool_prints_the_curve_and_writes_the_page_without_torch(tmp_path: Path):
    write_run(tmp_path, {1: 9.0, 2: 5.0}, {2: 6.0})
    page = tmp_path / "run.html"
    command = [sys.executable, "-X", "importtime", str(TOOL), str(tmp_path), "--html", str(page)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert run.stdout.startswith("      loss in nats per token")
    assert run.stdout.endswith(f"page             {page}\n")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "| torch" not in run.stderr
    missing = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path / "no")], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 64
    assert missing.stderr.count("\n") == 1


def test_several_runs_share_the_charts_of_one_page(tmp_path: Path):
    for name, losses in {"one": {1: 9.0, 2: 7.0}, "<two>": {1: 8.0, 2: 6.0, 3: 5.0}}.items():
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, losses, {2: 6.5} if name == "one" else {})
    command = [sys.executable, str(TOOL), "one", "<two>", "--html", "page.html"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("loss in nats per token") == 2
    page = (tmp_path / "page.html").read_text()
    assert "&lt;two&gt;" in page
    assert "<two>" not in page
    training, _, validation, *rest = svgs(page)
    classes = [path.attrib["class"] for path in training.iter("path") if "line" in path.attrib["class"]]
    assert classes == ["line run0", "line run1"]
    assert [len(line.split("L")) for line in lines(training)] == [2, 3]
    assert [bool(line) for line in lines(validation)] == [True, False]
    assert len(rest) == 3
    assert page.count(".run1 { stroke: #d55e00;") == 1


GOOD = {"iteration": 1, "lm_loss": 2.5, "consumed_tokens": 512, "grad_norm": 1.0, "tokens_per_second": 100.0}
_LARGE = 10**400
_SAMPLES = (1, {"a": 1}, ["a"], [{"prompt": 1, "text": 2}], [{"prompt": "a"}])
BAD: list[dict[str, Any]] = [
    *(GOOD | {"lm_loss": value} for value in ("a", [1], {}, None, True, _LARGE, "\x1b[2J")),
    *(GOOD | {"iteration": value} for value in ("1", 1.5, -1, None, True, 2**63, _LARGE)),
    *(GOOD | {"consumed_tokens": value} for value in ("a", None, [1], _LARGE)),
    {name: value for name, value in GOOD.items() if name != "consumed_tokens"},
    *(GOOD | {name: value} for name in ("grad_norm", "learning_rate", "tokens_per_second") for value in ("x", _LARGE)),
    *({"iteration": 1, "validation_loss": value} for value in ("a", None, [], _LARGE)),
    *({"iteration": 1, "tasks": value} for value in (1.5, [1], "a", {"a": 1}, {"a": {"loss": "x"}})),
    *({"iteration": 1, "tasks": {"a": {"accuracy": value}}} for value in (None, _LARGE)),
    *({"iteration": 1, "samples": value} for value in _SAMPLES),
    *(GOOD | {"slowest_rank": value} for value in (1, {"rank": 1}, {"rank": 1, "ratio": "x", "slow": []})),
    *(GOOD | {"slowest_rank": {"rank": 1, "ratio": 1.5, "slow": value}} for value in (5, ["a"])),
]


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("row", BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_row_that_is_none_is_named_with_its_line_and_left_out(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "metrics.jsonl", tmp_path / "run.html"
    write_rows(path, GOOD, row, GOOD | {"iteration": 3})
    assert show_run.main([str(tmp_path), "--html", str(page)]) == 0
    shown, drawn = capsys.readouterr(), page.read_text()
    assert shown.err.startswith(f"warning: {path}:2: not a row of a metrics file (")
    assert shown.err.endswith("); it is left out\n")
    assert shown.err.count("\n") == 1
    write_rows(path, GOOD, GOOD | {"iteration": 3})
    assert show_run.main([str(tmp_path), "--html", str(page)]) == 0
    assert (capsys.readouterr().out, page.read_text()) == (shown.out, drawn)


def test_a_file_without_a_row_is_no_metrics_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten lines are named, and how many more there are."""
    (tmp_path / "metrics.jsonl").write_text("x\n" * 30)
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: not a row of a metrics file .* neither is any other line"):
        read_history(tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 11
    assert said[-1].endswith("metrics.jsonl: 20 more lines are no rows and are left out")


def test_the_largest_numbers_are_shown(tmp_path: Path) -> None:
    """Finite numbers whose difference is not finite are counted as what cannot be drawn."""
    rows = [GOOD | {"iteration": 2**53 - 1 - at, "lm_loss": loss} for at, loss in enumerate((1.7e308, -1.7e308, 1e300))]
    write_rows(tmp_path / "metrics.jsonl", *rows)
    history = read_history(tmp_path)
    assert loss_chart(history)
    assert "not finite       2 losses, left out of the curve" in summary(history)
    assert elements(run_page(history, "run"))


def test_at_most_so_many_tasks_are_drawn() -> None:
    """The page says how many there are; a file of small rows would make a page of gigabytes."""
    rows = [{"iteration": 1, "tasks": {f"task {number}": {"loss": 1.0} for number in range(150)}}]
    found = elements(run_page(RunHistory([GOOD], [], tasks=rows), "run"))
    drawn = [each.attrib["aria-label"] for each in found if each.get("aria-label", "").startswith("Task")]
    assert drawn == [f"Task task {number} by iteration" for number in range(100)]
    assert [each.text for each in found if each.tag == "p" and "task" in (each.text or "")] == ["50 more tasks."]


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics\.jsonl is no regular file"):
        read_history(tmp_path)


def test_what_a_row_holds_does_not_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in what is left out, nor in what is compared, nor in the name of a folder."""
    folder, hostile = tmp_path / "\x1b[2J", HOSTILE.replace("\udcff", "")
    folder.mkdir()
    rows = [GOOD | {hostile: 1}, GOOD | {"tasks": {hostile: {hostile: hostile}}}]
    write_rows(folder / "metrics.jsonl", GOOD, *rows)
    write_rows(folder / "b.jsonl", GOOD | {hostile: hostile}, *rows)
    assert show_run.main([str(folder), str(folder / "b.jsonl"), "--html", str(tmp_path / "runs.html")]) == 0
    assert compare_runs.main(["--equal", str(folder / "metrics.jsonl"), str(folder / "b.jsonl")]) == 1
    assert compare_runs.main([str(folder / "metrics.jsonl"), str(folder / "b.jsonl")]) == 0
    shown = capsys.readouterr()
    assert "\\x1b[2J" in shown.out
    assert "\\x1b[2J" in shown.err
    assert all(character.isprintable() or character == "\n" for character in shown.out + shown.err)
    assert elements((tmp_path / "runs.html").read_text())


def test_a_page_shows_the_load_of_experts_layers_against_experts(tmp_path: Path) -> None:
    def load(layer: int, *tokens: int) -> LayerLoad:
        return LayerLoad(layer=layer, tokens=tokens, dropped=0.0, router_z=1.5, bias=None)

    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        for iteration, busiest in ((1, 16), (2, 24)):
            loads = (load(1, 8, 8, 8, 8), load(2, busiest, 32 - busiest, 0, 0))
            file.write(step(iteration=iteration, reports=(load_report(loads, has_capacity=False),)))
    page = run_page(read_history(tmp_path), "run")
    picture = svgs(page)[-1]
    cells = [(cell.attrib["fill"], "".join(cell.itertext())) for cell in picture.iter("rect")]
    assert len(cells) == 8
    assert cells[0] == ("#ffffff", "layer 1, expert 0: 8, 1.00 of an even load")
    assert cells[6] == ("#000000", "layer 2, expert 2: 0, 0.00 of an even load")
    assert cells[4][1] == "layer 2, expert 0: 24, 3.00 of an even load"
    assert "Busiest expert" in page


def test_a_long_run_is_smoothed_and_drawn_again_with_logarithmic_axes(tmp_path: Path) -> None:
    """From fifty steps on; the single steps stay, faint, with their values under the pointer."""
    losses = {at: 8.0 / at + (at % 2) for at in range(1, 61)}
    page = run_page(write_run(tmp_path, losses, {30: 2.0}), "run")
    charts = {chart.attrib["aria-label"]: chart for chart in svgs(page)}
    assert list(charts)[:3] == [
        "Loss by iteration",
        "Loss, second half by iteration",
        "Loss, logarithmic axes by iteration",
    ]
    faint, smooth = lines(charts["Loss by iteration"])[:2]
    assert faint.count("L") == smooth.count("L") == 59
    heights = [[float(at.split(" ")[1]) for at in line.removeprefix("M").split("L")] for line in (faint, smooth)]
    jumps = [sum(abs(after - before) for before, after in itertools.pairwise(line)) for line in heights]
    assert jumps[1] < jumps[0] / 3
    assert "iteration 60: 0.133333" in [title.text for title in charts["Loss by iteration"].iter("title")]
    places = [float(at.split(" ")[0]) for at in lines(charts["Loss, logarithmic axes by iteration"])[0][1:].split("L")]
    assert places[1] - places[0] == pytest.approx(places[3] - places[1], abs=0.2), "1 to 2 is as far as 2 to 4"
    assert "Loss, second half" not in run_page(write_run(tmp_path, dict.fromkeys(range(1, 50), 2.0), {}), "run")


def test_tokens_stand_under_the_axis_and_a_change_of_ranks_is_marked() -> None:
    rows = [{"consumed_tokens": 1_500_000 * at, "world_size": 1 if at < 3 else 8} for at in range(1, 6)]
    page = run_page(of_rows(*rows), "run", facts=["model            of one layer"])
    [loss, *_] = svgs(page)
    texts = [text.text for text in loss.iter("text")]
    assert texts[texts.index("tokens") :] == ["tokens", "3M", "4.5M", "6M", "7.5M"]
    [change] = [path for path in loss.iter("path") if path.attrib["class"] == "change"]
    assert "".join(change.itertext()) == "iteration 3: 1 -> 8 ranks"
    head = texts_of_head(page)
    assert head[0] == "model            of one layer"
    assert head[1].startswith("training loss")
    assert head[-1] == "changed          at iteration 3: 1 \u2192 8 ranks"


def test_a_resume_is_marked_with_as_many_ranks_too_and_both_phases_lie_on_one_chart() -> None:
    rows = [
        {"world_size": 1 if at < 8 else 8, "resumed_at": 0 if at < 4 else 3 if at < 8 else 7} for at in range(1, 11)
    ]
    page = run_page(of_rows(*rows), "run")
    loss = svgs(page)[0]
    changes = ["".join(path.itertext()) for path in loss.iter("path") if path.attrib["class"] == "change"]
    assert changes == ["iteration 3: resumed", "iteration 7: resumed, 1 -> 8 ranks"]
    assert "changed          at iteration 3: resumed" in texts_of_head(page)
    assert [line.count("L") for line in lines(loss)] == [6, 2]
    assert [path.attrib["class"] for path in loss.iter("path")][-2:] == ["line", "line third"]
    assert re.findall(r'<span class="key[^"]*">(.*?)</span>', page) == [
        "\u2500\u00a0training, 1 rank",
        "\u2500\u00a0training, 8 ranks",
    ]


def test_the_rows_of_a_resumed_run_say_where_it_went_on(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        file.write(step(iteration=1))
        file.write(step(iteration=2, resumed_at=1))
    assert [row.get("resumed_at") for row in read_history(tmp_path).steps] == [None, 1]


def test_a_long_run_can_be_enlarged_without_a_script() -> None:
    page = run_page(of_rows(*({"lm_loss": 2.0 + 1 / at} for at in range(1, 201))), "run")
    within = page.partition("<details>")[2].partition("</details>")[0]
    assert [chart.attrib["aria-label"] for chart in svgs(within)] == [
        f"Loss, {begin} to {end} by iteration" for begin, end in ((1, 50), (50, 100), (100, 150), (150, 200))
    ]
    assert "iteration 175: 2.00571" in within
    assert "<details>" not in run_page(of_rows(*({} for _ in range(49))), "run")


@pytest.mark.parametrize(("ranks", "drawn"), [(8, 8), (1, 0), (6, 0), (None, 0)])
def test_the_layout_is_that_of_the_ranks_that_ran(ranks: int | None, drawn: int, tmp_path: Path) -> None:
    """A checkpoint does not say how many ranks there were, and may be of another number than the last rows."""
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "world_size": 4}
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002/config.yaml").write_text(to_yaml(small_config(LLAMA, layout, {"train_iters": 2})))
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        file.write(step(iteration=1, world_size=1))
        file.write(step(iteration=2, world_size=ranks))
    assert show_run.main([str(tmp_path), "--html", str(tmp_path / "run.html")]) == 0
    assert (tmp_path / "run.html").read_text().count('class="rank"') == drawn


def test_the_page_draws_the_layout_and_links_to_files(tmp_path: Path) -> None:
    values = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "world_size": 8}
    layout = small_config(LLAMA, values, {"train_iters": 1}).layout
    page = run_page(of_rows({}), "run", layout=layout, files=["hf", "a b/<c>:d"])
    drawn = next(chart for chart in svgs(page) if chart.attrib["aria-label"].startswith("layout"))
    boxes = [each for each in drawn.iter("rect") if each.attrib["class"] == "rank"]
    titles = ["".join(each.itertext()) for each in boxes]
    assert len(titles) == 8
    assert titles[5] == "rank 5: tensor 1, context 0, data 0, stage 1"
    places = [(float(each.attrib["x"]), float(each.attrib["y"])) for each in boxes]
    assert len(set(places)) == 8
    assert places[0][1] == places[1][1] == places[4][1]
    links = [(each.text, each.attrib["href"]) for each in elements(page) if each.tag == "a"]
    assert links == [("hf", "hf"), ("a b/<c>:d", "a%20b/%3Cc%3E%3Ad")]
    write_run(tmp_path, {1: 9.0, 2: 7.0}, {})
    command = [str(tmp_path), "--html", str(tmp_path / "pages/run.html"), "--files", str(tmp_path / "metrics.jsonl")]
    (tmp_path / "pages").mkdir()
    assert show_run.main(command) == 0
    assert '<a href="../metrics.jsonl">../metrics.jsonl</a>' in (tmp_path / "pages/run.html").read_text()


def test_runs_are_named_by_what_their_paths_do_not_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/one", "a/two", "b/two"):
        (tmp_path / name).mkdir(parents=True)
        write_run(tmp_path / name, {1: 9.0, 2: 7.0}, {})
    picture = tmp_path / "losses.svg"
    assert show_run.main([*(str(tmp_path / name) for name in ("a/one", "a/two")), "--svg", str(picture)]) == 0
    assert re.findall("^== (.*)$", capsys.readouterr().out, re.MULTILINE) == ["one", "two"]
    assert show_run.main([str(tmp_path / name) for name in ("a/two/metrics.jsonl", "b/two")]) == 0
    assert re.findall("^== (.*)$", capsys.readouterr().out, re.MULTILINE) == ["a/two", "b/two"]
    drawn = ElementTree.fromstring(picture.read_text())
    found = [
        path.attrib["d"] for path in drawn.iter("{http://www.w3.org/2000/svg}path") if "line" in path.attrib["class"]
    ]
    assert len(found) == 2
    assert found[0] == found[1], "equal losses lie on each other"


def test_a_page_has_the_commands_of_the_starts_and_those_that_may_follow() -> None:
    """Equal ones in a row once; hostile words are text."""
    begun = [
        Start(f"2026-11-2{day}T17:30:14+00:00", ranks, f"megatron-ext pretrain --lr {rate} '<b>'")
        for day, ranks, rate in (
            (1, 1, 0.1),
            (2, 1, 0.1),
            (3, 8, 0.1),
            (4, 8, 0.2),
        )
    ]
    page = run_page(of_rows({}), "run", starts=begun, following=["megatron-ext show a"])
    assert elements(page)
    commands = page.partition("<h2>Command</h2>")[2]
    assert re.findall("<p>(.*?)</p>", commands) == [
        "2026-11-21 17:30 UTC, 1 rank",
        "2026-11-23 17:30 UTC, 8 ranks",
        "2026-11-24 17:30 UTC, 8 ranks",
    ]
    shown = [html.unescape(command) for command in re.findall("<pre>(.*?)</pre>", commands)]
    assert shown == [*(start.command for start in (begun[0], begun[2], begun[3])), "megatron-ext show a"]


def test_empty_lines_of_a_sample_are_counted_in_the_place_of_many() -> None:
    texts = ("a\n\nb", "a\n\n\n\n\nb")
    rows = [{"iteration": at, "samples": [{"prompt": "", "text": text}]} for at, text in enumerate(texts)]
    page = run_page(RunHistory([GOOD], [], samples=rows), "run")
    assert [f"</span>{text}</pre>" in page for text in ("a\n\nb", "a\n[4 empty lines]\nb")] == [True, True]
