"""The picture of a pipeline: as text, as SVG, and the memory that it shows."""

import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.hardware import Machine, hardware
from megatron_ext.cost.memory import stage_memory
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.workload import Workload
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.commands import draw_pipeline
from megatron_ext.plugins.planner.estimate import step_time
from megatron_ext.plugins.planner.search_input import placeholders
from megatron_ext.plugins.planner.simulated_timeline import equal_stages, preview
from megatron_ext.plugins.planner.timeline import Block, Lane, Pass, Timeline, duration
from megatron_ext.plugins.planner.timeline_svg import as_page
from megatron_ext.plugins.planner.timeline_text import as_text
from tests.support import plans
from tests.support.golden_text import section
from tests.support.pages import elements

# Of the second tier: tests/plugins/planner/test_search_answers.py plans.
pytestmark = pytest.mark.full

TOOL = Path(__file__).parents[3] / "tools" / "draw_pipeline.py"
MACHINE = Machine(hardware("h100"), gpus_per_node=8, efficiency=0.5, link_efficiency=0.8)
FLAGS = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16 "
    "--global-batch-size 32 --micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel "
    "--hidden-dropout 0 --attention-dropout 0 --pipeline-model-parallel-size 4 --use-distributed-optimizer"
)


def config(flags: str = "") -> Config:
    values = parse(f"{FLAGS} {flags}".split()).values
    return resolve({**values, **placeholders(values), "world_size": 16}, Facts())


def test_1f1b_as_text() -> None:
    lines = as_text(equal_stages(3, 1, 4), width=50)
    assert lines[2:7] == [
        "          |fil|steady state           |drain",
        "stage 0  |001122        aaaa33bbbb  cccc  dddd|",
        "stage 1  |  0011    aaaa22bbbb33cccc  dddd    |",
        "stage 2  |    00aaaa11bbbb22cccc33dddd        |",
        "          0                                 18",
    ]


def test_the_pictures_of_the_page_are_those_of_the_tool() -> None:
    page = (TOOL.parents[1] / "docs" / "inside" / "pipelines.md").read_text()
    for words, chunks, width in (("", 1, 94), ("--chunks 2 ", 2, 98)):
        drawn = "\n".join(as_text(equal_stages(4, chunks, 8), width)[: 4 * chunks + 4])
        assert f"python tools/draw_pipeline.py --stages 4 {words}--microbatches 8\n```\n\n```text\n{drawn}\n" in page


def test_the_text_is_as_wide_as_it_may_be_and_no_wider() -> None:
    for width in (60, 79, 100, 200):
        lines = as_text(equal_stages(4, 2, 8), width)
        assert max(len(line) for line in lines if line.startswith("stage 0")) <= width


def test_fill_and_drain_are_those_of_the_formula() -> None:
    timeline = equal_stages(4, 1, 8)
    assert (timeline.fill, timeline.total - timeline.drain) == (3.0, pytest.approx(6.0))
    assert timeline.total == pytest.approx(3 * (8 + 3))


@pytest.mark.parametrize("flags", ["", "--num-virtual-stages-per-pipeline-rank 2", "--recompute-activations"])
def test_the_picture_shows_what_the_estimates_say(flags: str) -> None:
    resolved = config(flags)
    whole = preview(resolved, MACHINE, microbatches=1000)
    time = step_time(resolved, Shapes(resolved), MACHINE)
    assert len({each.microbatch for each in whole.lanes[0].passes}) == 16
    assert whole.total == pytest.approx(time.total - time.wait, rel=1e-9)
    assert 0.9 * time.total < whole.passes_end <= time.total - time.optimizer + 1e-9
    [update] = [block for block in whole.lanes[0].blocks if block.name == "update"]
    assert update.end - update.begin == pytest.approx(time.optimizer, rel=1e-6)
    for stage, lane in enumerate(whole.lanes):
        assert lane.peak is not None
        assert lane.peak[1] == pytest.approx(
            stage_memory(Workload(resolved, Shapes(resolved), fused=True), stage).total, rel=1e-12
        )
        assert lane.communicated > 0.0


def test_a_few_microbatches_show_the_memory_of_all() -> None:
    resolved = config("--global-batch-size 256 --num-virtual-stages-per-pipeline-rank 2")
    few = preview(resolved, MACHINE)
    assert len({each.microbatch for each in few.lanes[0].passes}) == 8 < 256 // 2
    for stage, lane in enumerate(few.lanes):
        assert lane.peak is not None
        assert lane.peak[1] == pytest.approx(
            stage_memory(Workload(resolved, Shapes(resolved), fused=True), stage).total, rel=1e-12
        )


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in page.split("<svg")[1:]]


def test_the_page_has_each_pass_where_it_is() -> None:
    timeline = preview(config("--num-virtual-stages-per-pipeline-rank 2"), MACHINE, microbatches=8)
    text = as_page(timeline, ["<a remark>"])
    assert "&lt;a remark&gt;" in text
    assert elements(text)
    assert "http:" not in text
    assert "https:" not in text
    assert "<script" not in text
    drawing, memories = svgs(text)
    boxes = [box for box in drawing.iter("rect") if box.attrib["class"].startswith("pass")]
    assert len(boxes) == sum(len(lane.passes) for lane in timeline.lanes) == 4 * 2 * 2 * 8
    first = timeline.lanes[0].passes[1]
    scale = float(boxes[0].attrib["width"]) / (timeline.lanes[0].passes[0].end - timeline.lanes[0].passes[0].begin)
    assert float(boxes[1].attrib["x"]) == pytest.approx(110 + first.begin * scale, abs=0.2)
    assert [title.text for title in boxes[0].iter("title")] == [
        f"forward pass of microbatch 0, chunk 0: 0 us to {duration(timeline.lanes[0].passes[0].end)}"
    ]
    assert sum(path.attrib["class"] == "memory" for path in memories.iter("path")) == 4


def test_every_kind_of_box_has_its_colour_and_a_swatch_with_a_text() -> None:
    passes = (Pass(True, 1, 0, 0, 1), Pass(False, 1, 0, 1, 2, "inputs"), Pass(False, 1, 0, 2, 3, "weights"))
    blocks = (Block("communication", 0, 1), Block("gradients", 3, 4), Block("update", 4, 5))
    page = as_page(Timeline("one", (Lane("stage 0", passes, blocks),), 2, 5.0))
    key = re.findall(r'background:var\(--(\w+)\);opacity:([\d.]+)"></i>([^<]+)', page)
    assert key == [
        ("first", "1.00", "forward"),
        ("second", "1.00", "backward"),
        ("third", "1.00", "backward of the weights"),
        ("first", "0.70", "forward, chunk 1"),
        ("second", "0.70", "backward, chunk 1"),
        ("ink", "1.00", "exposed communication"),
        ("fourth", "1.00", "gradients between ranks"),
        ("fifth", "1.00", "update of the weights"),
    ]
    assert page.count('class="swatch"') == len(key)
    boxes = [each.attrib["class"] for each in svgs(page)[0].iter("rect")]
    assert boxes == ["lane", *(f"pass {kind}" for kind in ("forward", "backward", "weights"))] + [
        f"block {each.name}" for each in blocks
    ]
    fills = [re.findall(rf"\.{kind} {{ fill: (.*?);", page) for kind in (*KINDS, "block")]
    assert len({fill for [fill] in fills}) == len(fills)
    assert "backward pass for the weights of microbatch 0, chunk 1: " in page


KINDS = ("forward", "backward", "weights", "gradients", "update")


@pytest.mark.parametrize(("words", "chunks"), [("", 1), ("", 2), ("zbv", 2)])
def test_text_and_table_mean_the_same_by_waiting(words: str, chunks: int) -> None:
    lines = as_text(equal_stages(4, chunks, 8, name=words or None))
    [share] = [line.split()[3] for line in lines if line.startswith("Each stage waits ")]
    table = lines.index("         forward  backward  works  waits  communicates")
    assert {line.split()[5] for line in lines[table + 1 : table + 5]} == {share}
    assert lines[table + 5] == "Shares are of the time until the last pass of the 8 microbatches drawn ends."


def test_memory_is_drawn_from_when_it_is_known() -> None:
    """A recorded stage says it first when its first pass ends, which is no memory of 0 before."""
    passes = (Pass(True, 0, 0, 0.2, 0.5), Pass(False, 0, 0, 0.5, 1.0))
    timeline = Timeline("one", (Lane("stage 0", passes, (), ((0.5, 3e9), (1.0, 2e9))),), 1, 1.0)
    [area] = [path for path in svgs(as_page(timeline))[1].iter("path") if path.attrib["class"] == "memory"]
    half = 110 + 0.5 * (1120 - 110 - 84)
    assert area.attrib["d"].startswith(f"M{half:.2f} ")


def test_an_empty_timeline_is_drawn() -> None:
    empty = Timeline("nothing", (Lane("stage 0", ()),), 1, 0.0)
    assert as_text(empty)
    assert svgs(as_page(empty))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give one of --stages N"),
        ("--stages 4 -- --num-layers 4", "give one of --stages N"),
        ("--stages 0", "numbers from 1"),
        ("--stages 4 --chunks 2 --microbatches 6", "leave 2"),
        ("--stages 4 --schedule zvb", "--schedule zvb is none of "),
        ("--stages 4 --chunks 2 --schedule gpipe", "--schedule gpipe is made for another number of chunks"),
        ("--stages 4 --chunks 1 --schedule zbv", "--schedule zbv"),
        ("--microbatches 0 -- --num-layers 4", "--microbatches 0 is not a number from 1"),
        ("-- --num-layers 5 --global-batch-size 4 --pipeline-model-parallel-size 2", "--num-layers"),
    ],
)
def test_what_cannot_be_drawn_is_said(words: str, message: str) -> None:
    run = subprocess.run([sys.executable, str(TOOL), *words.split()], capture_output=True, text=True, check=False)
    assert run.returncode == 64
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`draw_pipeline.py | head -1`: the pipe is closed before all is written."""
    drawn = _shell(f"{sys.executable} {TOOL} --stages 32 --chunks 8 --microbatches 64 --width 9000 | head -1")
    assert drawn.stdout.startswith("32 stages x 8 chunks")
    short = _shell(f"{sys.executable} {TOOL} --stages 2 | true")
    for run in (drawn, short):
        assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("title", plans.PICTURES)
def test_each_picture_is_drawn_as_before(title: str) -> None:
    assert plans.picture(title).rstrip() == section("pipelines.txt", title), "python tests/golden/regenerate.py"


def test_a_phase_that_is_thinner_than_a_line_has_no_border() -> None:
    for begins, borders in ((0.0005, 2), (0.002, 3)):
        lanes = (
            Lane("stage 0", (Pass(True, 0, 0, 0.0, 0.5),)),
            Lane("stage 1", (Pass(True, 0, 0, begins, 1.0),)),
        )
        drawing = svgs(as_page(Timeline("two", lanes, 1, 1.0)))[0]
        assert sum(path.attrib["class"] == "phase" for path in drawing.iter("path")) == borders


def test_text_that_goes_to_no_terminal_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    """The last group of microbatches may be as large as the others."""
    words = ["--stages", "2", "--chunks", "2", "--microbatches", "4", "--group", "2", "--width", "80"]
    assert draw_pipeline.main(words) == 0
    assert capsys.readouterr().out == "\n".join(as_text(equal_stages(2, 2, 4, 2), 80)) + "\n"


@pytest.mark.parametrize(("microbatches", "group", "left"), [(5, 2, 1), (4, 3, 1), (2, 1, 0)])
def test_interleaved_groups_need_a_microbatch_a_stage(microbatches: int, group: int, left: int) -> None:
    words = f"--stages 2 --chunks 2 --microbatches {microbatches} --group {group}"
    with pytest.raises(ConfigurationError, match=f"--microbatches {microbatches} in groups of {group} leave {left}"):
        draw_pipeline.main(words.split())


def test_a_schedule_of_a_table_is_drawn_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Zero bubble in a V: the last stage hands its first chunk's output to itself, and halves have letters."""
    words = ["--stages", "2", "--chunks", "2", "--microbatches", "4", "--schedule", "zbv", "--width", "80"]
    assert draw_pipeline.main(words) == 0
    rows = re.findall(r"^stage \d chunk \d +\|(.*)\|$", capsys.readouterr().out, re.MULTILINE)
    assert [row.index("0") for row in rows] == [0, 6, 2, 4]
    assert all(set("abcdABCD") <= set(row) for row in rows)
