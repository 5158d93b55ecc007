"""Draws which rank has which part: a box for each pipeline stage of each data-parallel replica, and in it its ranks."""

from megatron_ext.config.derived.rank_order import axis_sizes, coordinates
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.plugins.pages.charts import label, svg, wide
from megatron_ext.plugins.pages.markup import Content, Markup, element

_MOST_RANKS = 256
_CELL, _HIGH, _GAP, _LEFT, _TOP = 58, 26, 12, 96, 24

STYLE = """
.rank { fill: var(--first); fill-opacity: .18; stroke: var(--first); }
.stage { fill: none; stroke: var(--quiet); }
"""


def as_section(layout: LayoutConfig) -> Markup:
    """Return the picture as a part of a page, which has STYLE among its rules; of many ranks, only the numbers.

    Columns are pipeline stages and rows are data-parallel replicas. In a box the tensor-parallel ranks stand next to
    each other, and context-parallel ones below each other.
    """
    sizes = axis_sizes(layout)
    words = (("tensor", sizes.tp), ("context", sizes.cp), ("pipeline", sizes.pp), ("data", sizes.dp))
    text = ", ".join(f"{name} parallel {size}" for name, size in words)
    heading: list[Content] = ["Layout ", element("span", text)]
    if layout.world_size > _MOST_RANKS:
        return wide(heading, element("p", f"{layout.world_size:,} ranks: too many to draw."))
    width, height = sizes.tp * _CELL + _GAP, sizes.cp * _HIGH + _GAP
    marks: list[Content] = []
    for stage in range(sizes.pp):
        marks.append(label(_LEFT + (stage + 0.5) * width - _GAP / 2, _TOP - 8, f"stage {stage}", "middle"))
        for replica in range(sizes.dp):
            place = {"x": _LEFT + stage * width - 3, "y": _TOP + replica * height - 3}
            marks.append(element("rect", class_="stage", **place, width=width - _GAP + 6, height=height - _GAP + 6))
    for replica in range(sizes.dp):
        marks.append(label(_LEFT - 12, _TOP + replica * height + _HIGH / 2 + 4, f"replica {replica}", "end"))
    for rank in range(layout.world_size):
        at = coordinates(layout, rank)
        x, y = _LEFT + at.pp * width + at.tp * _CELL, _TOP + at.dp * height + at.cp * _HIGH
        hover = element("title", f"rank {rank}: tensor {at.tp}, context {at.cp}, data {at.dp}, stage {at.pp}")
        marks.append(element("rect", hover, class_="rank", x=x, y=y, width=_CELL - 2, height=_HIGH - 2))
        marks.append(label(x + _CELL / 2 - 1, y + _HIGH / 2 + 3, f"rank {rank}", "middle"))
    size = max(_LEFT + sizes.pp * width, 320), _TOP + sizes.dp * height
    return wide(heading, svg(*size, f"layout: {text}", [[mark, "\n"] for mark in marks], natural=True))
