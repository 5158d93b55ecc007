"""Charts as they are drawn: where each point, tick and title lies, computed here from the size of the drawing."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_ext.plugins.pages.charts import Point, Series, chart, page, ticks
from megatron_ext.plugins.pages.loss_curve import RunHistory
from megatron_ext.plugins.pages.run_page import run_page, runs_page
from megatron_ext.plugins.planner.commands import plan
from megatron_ext.plugins.planner.simulated_timeline import equal_stages
from megatron_ext.plugins.planner.timeline_svg import as_page
from tests.support.browser import CHROMIUM, NONE_HERE, measure


def drawn(*series: Series, doublings: bool = False) -> ElementTree.Element:
    text = chart("Loss", "nats", series, along="step", doublings=doublings)
    return ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + len("</svg>")])


def line_of(svg: ElementTree.Element, number: int = 0) -> str:
    return [path.attrib["d"] for path in svg.iter("path") if path.attrib["class"].startswith("line")][number]


def labels(svg: ElementTree.Element, anchor: str) -> list[str | None]:
    return [text.text for text in svg.iter("text") if text.attrib["text-anchor"] == anchor]


@pytest.mark.parametrize(
    ("low", "high", "about", "found"),
    [
        (0.0, 10.0, 5, [0, 2, 4, 6, 8, 10]),  # both ends are ticks, and a step that is just long enough is taken
        (0.0, 5.0, 5, [0, 1, 2, 3, 4, 5]),
        (0.0, 25.0, 5, [0, 5, 10, 15, 20, 25]),
        (0.1, 10.9, 5, [5, 10]),
        (0.0, 31.0, 5, [0, 10, 20, 30]),
        (-1.0, 1.0, 5, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0.25, 0.55, 4, [0.3, 0.4, 0.5]),
        (1.0, 100.0, 6, [20, 40, 60, 80, 100]),
        (2000.0, 9000.0, 6, [2000, 4000, 6000, 8000]),
    ],
)
def test_ticks_are_round_and_lie_within(low: float, high: float, about: int, found: list[float]) -> None:
    assert ticks(low, high, about) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    ("points", "line", "values"),
    [
        # The plot is from x 64 to 532 and from y 230 up to 12, with a twentieth of the range below and above.
        ([(0, 0.0), (10, 1.0)], "M64.0 220.1L532.0 21.9", ["0", "0.5", "1"]),
        # A constant has a twentieth of itself on both sides, a negative one too; zero has one.
        ([(3, 40.0), (4, 40.0)], "M64.0 121.0L532.0 121.0", ["38", "39", "40", "41", "42"]),
        ([(3, -40.0), (4, -40.0)], "M64.0 121.0L532.0 121.0", ["-42", "-41", "-40", "-39", "-38"]),
        ([(3, 0.0), (4, 0.0)], "M64.0 121.0L532.0 121.0", ["-1", "-0.5", "0", "0.5", "1"]),
        ([(7, 40.0)], "M64.0 121.0", ["38", "39", "40", "41", "42"]),  # the first point of a run
    ],
)
def test_where_points_lie(points: list[Point], line: str, values: list[str]) -> None:
    svg = drawn(Series(points))
    assert line_of(svg) == line
    assert labels(svg, "end") == ["step", *values]


def test_doublings_are_equally_far_apart() -> None:
    svg = drawn(Series([(2, 1.0), (4, 1.0), (8, 1.0), (16, 1.0)]), doublings=True)
    assert re.findall(r"[ML]([\d.]+)", line_of(svg)) == ["64.0", "220.0", "376.0", "532.0"]
    assert labels(svg, "middle") == ["2", "4", "8", "16"]
    assert "step" not in labels(svg, "end"), "the heading says it"


@pytest.mark.parametrize(("number", "shown"), [(8, range(8)), (9, range(0, 9, 2)), (17, range(0, 17, 3))])
def test_at_most_eight_doublings_have_a_tick(number: int, shown: Sequence[int]) -> None:
    svg = drawn(Series([(2**k, 1.0) for k in range(number)]), doublings=True)
    assert labels(svg, "middle") == [f"{2**k:,}" for k in shown]


def test_the_key_names_each_line_of_several() -> None:
    one, two = Series([(1, 1.0)], "a <b>"), Series([(1, 2.0)], "c", dotted=True)
    assert "key" not in chart("Loss", "nats", [one], along="step")
    heading = chart("Loss", "nats", [one, two], along="step").split("</h2>")[0]
    assert heading == chart("Loss", "nats", [one, two, Series([(1, 3.0)])], along="step").split("</h2>")[0]
    assert heading == (
        '<section>\n<h2>Loss <span>nats</span> <span class="key">─\u00a0a &lt;b&gt;</span> '
        '<span class="key second">●\u00a0c</span>'
    )
    assert "<h2>Loss <span>nats by step</span>" in chart("Loss", "nats", [one], along="step", doublings=True)


def test_each_line_has_its_class() -> None:
    series = [Series([(1, 1.0)], "a", style="run0"), Series([(1, 2.0)], dotted=True), Series([(1, 2.0)])]
    classes = [path.attrib["class"] for path in drawn(*series).iter("path")]
    assert [name for name in classes if name != "grid"] == ["line run0", "line second", "line"]


def test_the_value_under_the_pointer() -> None:
    svg = drawn(Series([(0, 1.0), (1, math.nan), (2, 2.5)]))
    hits = [(hit.attrib["x"], hit.attrib["width"], hit[0].text) for hit in svg.iter("rect")]
    assert hits == [("-53.0", "234.0", "step 0: 1"), ("415.0", "234.0", "step 2: 2.5")]


@pytest.mark.parametrize("number", [600, 601, 1200, 1201, 20_000])
def test_a_long_line_keeps_its_extremes_and_its_order(number: int) -> None:
    """At most 600 points: all, or the lowest and the highest of each group of neighbours."""
    values = [math.sin(x * x) for x in range(number)]
    values[number // 3], values[number // 2] = 9.0, -9.0
    path = line_of(drawn(Series(list(enumerate(values)))))
    xs = [float(x) for x in re.findall(r"[ML]([\d.]+)", path)]
    assert xs == sorted(xs)
    assert number == 600 or 300 < len(xs) <= 600
    assert len(xs) <= 600
    assert path.count(" 21.9") == path.count(" 220.1") == 1


def test_a_long_line_is_broken_where_nothing_is_finite() -> None:
    values = [math.nan if 400 <= x < 800 else float(x % 7) for x in range(1200)]
    path = line_of(drawn(Series(list(enumerate(values)))))
    assert path.count("M") == 2
    first, second = (re.findall(r"([\d.]+) [\d.]+", part) for part in path.split("M")[1:])
    x = [64.0 + 468.0 * at / 1199 for at in (399, 800)]
    assert x[0] - 2.0 < float(first[-1]) <= x[0] + 0.1
    assert x[1] - 0.1 <= float(second[0]) < x[1] + 2.0


def test_what_stands_on_a_page_is_text() -> None:
    text = page("<run>", ["1 < 2", "b & c"], "<main>\n", style=".own {}")
    assert "<title>&lt;run&gt;</title>" in text
    head = "<pre><span>1 &lt; 2</span>\n<span>b &amp; c</span></pre>"
    assert f"<h1>&lt;run&gt;</h1>\n{head}\n&lt;main&gt;\n</body>" in text
    assert text.split("</style>")[0].endswith(".own {}")


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)


def a_run(steps: int) -> RunHistory:
    """A run whose speed falls when it goes on with more ranks, with samples that have long lines."""
    rows = [
        {
            "iteration": at,
            "lm_loss": 2 + 8 / math.sqrt(at) + 0.1 * math.sin(7 * at),
            "consumed_tokens": 2048 * at,
            "learning_rate": 3e-4 * (1 - at / steps / 2),
            "grad_norm": 0.5 + 0.2 * math.sin(at),
            "tokens_per_second": 9500.0 if at < steps * 0.9 else 2700.0,
            "world_size": 1 if at < steps * 0.9 else 8,
        }
        for at in range(1, steps + 1)
    ]
    samples = [
        {"iteration": steps, "samples": [{"prompt": "class A:", "text": "word" * 60 + "\n    def f(self): ..."}]}
    ]
    return RunHistory(rows, [{"iteration": steps, "validation_loss": 2.4}], samples=samples)


PAGES: dict[str, Callable[[], str]] = {
    "run": lambda: run_page(a_run(1200), "runs/quickstart/checkpoints", facts=["model            " + "word " * 60]),
    "short run": lambda: run_page(a_run(9), "runs/short"),
    "runs": lambda: runs_page({"a-run-with-a-rather-long-name-of-its-own": a_run(300), "other": a_run(100)}),
    "pipeline": lambda: as_page(equal_stages(4, 2, 8), ["stage 2 is slow: a microbatch takes 3 s there."]),
}


@in_a_browser
@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_and_no_texts_lie_on_each_other(name: str, width: int, tmp_path: Path) -> None:
    found = measure(PAGES[name](), width, tmp_path)
    assert found["scrolls"] == 0
    assert found["cut"] == []
    assert found["overlaps"] == []
    assert found["small"] == 0
    assert (tmp_path / f"page-{width}.png").stat().st_size > 5000


@in_a_browser
@pytest.mark.parametrize("width", [360, 1600])
def test_the_page_of_a_plan_is_readable(width: int, tmp_path: Path) -> None:
    model = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16"
    sizes = "--max-position-embeddings 2048 --global-batch-size 16 --pipeline-model-parallel-size 2"
    words = ["--world-size", "4", "--number", "12", "--html", str(tmp_path / "plan.html"), "--"]
    assert plan.main([*words, *model.split(), *sizes.split()]) == 0
    found = measure((tmp_path / "plan.html").read_text(), width, tmp_path)
    del found["height"]
    assert found == {"scrolls": 0, "cut": [], "overlaps": [], "small": 0}
