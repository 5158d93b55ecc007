#!/usr/bin/env python3
"""Draw what each of four ranks holds under each way to divide a training: the pictures of docs/parallelism.md.

    python tools/draw_techniques.py              # into docs/images
    python tools/draw_techniques.py FOLDER

Exit codes: 0 done, 64 the folder is not there.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.plugins.pages.charts import label, picture
from megatron_ext.plugins.pages.markup import Content, Markup, element

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
_LEFT, _WIDE, _HIGH, _GAP, _TOP = 210, 118, 20, 14, 22
_STYLE = """
.all { fill: var(--quiet); fill-opacity: .3; } .part { fill: var(--first); }
.whole { fill: none; stroke: var(--quiet); }
.of-part { color: var(--first); } .of-all { color: var(--quiet); }
"""


class Technique(NamedTuple):
    """One way to divide a training over ranks."""

    title: str
    parts: tuple[str, ...]
    """What each rank holds a quarter of."""

    wholes: tuple[str, ...]
    """What each rank holds all of."""

    sends: str


TECHNIQUES = {
    "fsdp": Technique(
        "Fully sharded data parallelism",
        ("samples of the batch", "weights, between uses", "gradients", "optimizer state"),
        ("weights, in use",),
        "all-gather of each layer's weights before its passes; reduce-scatter of its gradients",
    ),
    "tensor": Technique(
        "Tensor parallelism",
        ("each matrix of a layer", "heads, MLP activations"),
        ("layers", "norms, residuals", "samples of the batch"),
        "four all-reduces of activations a layer and microbatch",
    ),
    "sequence": Technique(
        "Sequence parallelism, with tensor parallelism",
        ("each matrix of a layer", "heads, MLP activations", "positions in norms, residuals"),
        ("layers", "samples of the batch"),
        "all-gather before and reduce-scatter after attention and MLP, in place of the all-reduces",
    ),
    "context": Technique(
        "Context parallelism",
        ("positions of each sample",),
        ("layers and matrices", "samples of the batch"),
        "keys and values of each layer; gradients are summed over these ranks, too",
    ),
    "pipeline": Technique(
        "Pipeline parallelism",
        ("layers",),
        ("each matrix of a layer", "samples of the batch"),
        "activations from a stage to the next, their gradients back",
    ),
    "expert": Technique(
        "Expert parallelism",
        ("experts of a layer", "samples of the batch"),
        ("attention, norms, router",),
        "all-to-all: each token to the ranks of its experts, and back",
    ),
}


def sentence(technique: Technique) -> str:
    """Return what the picture shows, for readers who do not see it."""
    return (
        f"{technique.title}: each of {RANKS} ranks has a quarter of {' and of '.join(technique.parts)}, "
        f"and all of {' and of '.join(technique.wholes)}"
    )


def drawn(technique: Technique) -> Markup:
    """Return the picture: a row for each thing that is divided or not, a column for each rank."""
    marks: list[Content] = []
    rows = [*((name, True) for name in technique.parts), *((name, False) for name in technique.wholes)]
    for rank in range(RANKS):
        x = _LEFT + rank * (_WIDE + _GAP)
        marks.append(label(x + _WIDE / 2, _TOP - 8, f"rank {rank}", "middle"))
        for number, (_, divided) in enumerate(rows):
            y, width = _TOP + number * (_HIGH + 6), _WIDE / RANKS if divided else _WIDE
            begin = x + rank * width if divided else x
            kind = "part" if divided else "all"
            marks.append(element("rect", class_=kind, x=begin, y=y, width=width, height=_HIGH))
            marks.append(element("rect", class_="whole", x=x, y=y, width=_WIDE, height=_HIGH))
    marks += [label(_LEFT - 10, _TOP + n * (_HIGH + 6) + 14, name, "end") for n, (name, _) in enumerate(rows)]
    bottom = _TOP + len(rows) * (_HIGH + 6)
    marks.append(label(12, bottom + 16, f"sent: {technique.sends}", "start"))
    key = [("\u25a0 a quarter of it", "of-part"), ("\u25a0 all of it", "of-all")]
    width = _LEFT + RANKS * (_WIDE + _GAP)
    return picture(width, bottom + 28, technique.title, [[mark, "\n"] for mark in marks], key=key, style=_STYLE)


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Draw what each rank holds under each way to divide a training.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs/images", help="default: docs/images")
    folder = parser.parse_args(argv).folder
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder; make it first")
    for name, technique in TECHNIQUES.items():
        (folder / f"{name}_parallel.svg").write_text(drawn(technique), encoding="utf-8")
        print(f"wrote {folder / name}_parallel.svg")
    return 0


if __name__ == "__main__":
    run_tool(main)
